"""Memory nodes from sysfs: CPUs, memory, huge pages, distances. Ids may have gaps."""

from __future__ import annotations

import re

from preflight.host import HugePages, NumaNode
from preflight.looking import Looking, as_list, ids, keyed_kib, whole

NODES = "/sys/devices/system/node"


def numa_nodes(look: Looking) -> tuple[NumaNode, ...]:
    """Every online node in order of its id; empty where the kernel shows none."""
    online = ids(look.text(f"{NODES}/online"))
    if online is None:
        online = frozenset(
            int(n[4:]) for n in look.names(NODES) or () if re.fullmatch(r"node\d+", n)
        )
    gpu_nodes = _gpu_memory_nodes(look)
    return tuple(_node(look, index, index in gpu_nodes) for index in sorted(online))


def _node(look: Looking, index: int, gpu_memory: bool) -> NumaNode:
    folder = f"{NODES}/node{index}"
    memory = keyed_kib(look.text(f"{folder}/meminfo"))
    row = (look.text(f"{folder}/distance") or "").split()
    distances = tuple(d for d in map(whole, row) if d is not None)
    cpus = _cpus(look, folder)
    return NumaNode(
        index=index,
        cpus=cpus,
        socket=_socket(look, cpus),
        memory_total_bytes=memory.get("MemTotal"),
        memory_free_bytes=memory.get("MemFree"),
        huge_pages=huge_pages(look, f"{folder}/hugepages"),
        distances=distances if len(distances) == len(row) and row else None,
        gpu_memory=gpu_memory,
    )


def _cpus(look: Looking, folder: str) -> str | None:
    """The node's CPU list; where only the mask is there, the list of its bits."""
    listed = look.text(f"{folder}/cpulist")
    if listed is not None:
        return listed
    mask = (look.text(f"{folder}/cpumap") or "").replace(",", "")
    if not re.fullmatch(r"[0-9a-fA-F]+", mask):
        return None
    bits = int(mask, 16)
    return as_list([n for n in range(bits.bit_length()) if bits >> n & 1]) or ""


def _socket(look: Looking, cpus: str | None) -> int | None:
    """The package of the node's first CPU; a node lies in one socket."""
    first = min(ids(cpus) or (), default=None)
    if first is None:
        return None
    return look.number(f"/sys/devices/system/cpu/cpu{first}/topology/physical_package_id")


def huge_pages(look: Looking, folder: str) -> tuple[HugePages, ...]:
    """Pools under one hugepages folder, smallest page first. The size is in the folder's name."""
    found = []
    for name in look.names(folder) or ():
        match = re.fullmatch(r"hugepages-(\d+)kB", name)
        if match:
            found.append(
                HugePages(
                    page_bytes=int(match.group(1)) * 1024,
                    total=look.number(f"{folder}/{name}/nr_hugepages"),
                    free=look.number(f"{folder}/{name}/free_hugepages"),
                )
            )
    return tuple(sorted(found, key=lambda pool: pool.page_bytes))


def _gpu_memory_nodes(look: Looking) -> set[int]:
    """Nodes whose memory is a GPU's (POWER9, GH200): the driver lists them."""
    folder = "/proc/driver/nvidia/gpus"
    found = set()
    for address in look.names(folder) or ():
        status = look.text(f"{folder}/{address}/numa_status") or ""
        match = re.search(r"^Node:\s*(\d+)", status, re.M)
        if match:
            found.add(int(match.group(1)))
    return found
