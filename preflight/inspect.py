"""inspect(source) -> Host: asks every probe once and puts the answers together."""

from __future__ import annotations

from collections.abc import Mapping

from preflight import witnesses
from preflight.answers import Source
from preflight.host import Gpu, Host, Measured, Unread
from preflight.looking import Looking, keyed_kib
from preflight.nvml import DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND
from preflight.probes import gpu, memory, numa, pci, software, storage
from preflight.probes.memory import chosen

DEFAULT_FOLDERS: Mapping[str, str] = {"temporary": "/tmp"}


def inspect(source: Source, folders: Mapping[str, str] | None = None) -> Host:
    """What this machine is. Never raises: what could not be seen is None and listed in `unread`.

    `folders`: role (model, cache, temporary) -> absolute path of a folder that exists; left out,
    those that a recording was made with, or /tmp.
    """
    if folders is None:
        folders = source.folders or DEFAULT_FOLDERS
    source.folders = dict(folders)
    look = Looking(source)
    with look.ahead(*software.COMMANDS):
        return _host(look, folders)


def _host(look: Looking, folders: Mapping[str, str]) -> Host:
    source = look.source
    info = keyed_kib(look.text("/proc/meminfo"))
    nodes = numa.numa_nodes(look)
    only_node = nodes[0].index if len(nodes) == 1 else None
    cards = pci.nvidia_cards(look)
    found, refused = gpu.gpus(look, only_node)
    if found is None and refused is not None:
        # Any other refusal comes from a driver that is there: it may hide cards.
        if cards == () and refused.code in (DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND):
            found = ()
        else:
            look.unread.append(Unread(what="gpus", reason=refused.reason))
    found = _settled(look, found, frozenset(n.index for n in nodes if not n.cpus))
    topo = witnesses.topology(look, found or (), len(nodes))
    if found is not None:
        found = witnesses.placed(witnesses.filled(look, found), topo)
    name, virtual = software.cpu(look)
    programs = software.software(look, refused, virtual)
    if programs.docker_root:
        folders = {**folders, "docker": programs.docker_root}
    gpu_nodes = {g.memory_numa_node for g in found or ()}
    return Host(
        label=source.label,
        cpu_model=name,
        cpus_online=look.text("/sys/devices/system/cpu/online"),
        memory_total_bytes=info.get("MemTotal"),
        memory_available_bytes=info.get("MemAvailable"),
        memory_free_bytes=info.get("MemFree"),
        transparent_huge_pages=chosen(look.text("/sys/kernel/mm/transparent_hugepage/enabled")),
        memory=memory.memory(look),
        numa_nodes=tuple(
            n.model_copy(update={"gpu_memory": n.gpu_memory or n.index in gpu_nodes}) for n in nodes
        ),
        gpus=found,
        pci_gpus=cards,
        links=witnesses.linked(gpu.links(look, len(found or ())), topo),
        limits=memory.limits(look),
        software=programs.model_copy(update={"topo_error": topo.error}),
        disks=storage.disks(look, folders),
        measured=Measured.model_validate(source.measured) if source.measured else None,
        unread=tuple(dict.fromkeys(look.unread)),
    )


def _settled(
    look: Looking, found: tuple[Gpu, ...] | None, without_cpus: frozenset[int]
) -> tuple[Gpu, ...] | None:
    """Fill links from sysfs; only a node without CPUs can be a GPU's own memory."""
    if found is None:
        return None
    return tuple(
        g if g.memory_numa_node in without_cpus else g.model_copy(update={"memory_numa_node": None})
        for g in gpu.with_sysfs_links(look, found)
    )
