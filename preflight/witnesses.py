"""nvidia-smi beside NVML: what it says of places and links, and what NVML has no call for."""

from __future__ import annotations

from preflight.host import Gpu, Link
from preflight.looking import Looking
from preflight.witness.smi_xml import parse_xml
from preflight.witness.topo import Topo, parse_topo

# Facts worth a second tool where this NVML or this nvidia-ml-py has no call for them.
WANTED = ("memory_total_bytes", "pcie_generation_max", "recovery_action", "ecc_enabled",
          "remapped_rows_pending", "bar1_total_bytes")  # fmt: skip


def topology(look: Looking, gpus: tuple[Gpu, ...], nodes: int) -> Topo:
    """What `topo -m` says; empty where there is nothing to compare it with."""
    if len(gpus) < 2 and (nodes < 2 or not gpus):
        return Topo()
    ran = look.run("nvidia-smi", "topo", "-m")
    if ran is None:
        return Topo(error="nvidia-smi is not installed or did not answer")
    topo = parse_topo(ran.out)
    return topo if topo.rows else Topo(error=topo.error or "nvidia-smi printed no matrix")


def placed(gpus: tuple[Gpu, ...], topo: Topo) -> tuple[Gpu, ...]:
    """Each card with the node that topo -m names for it."""
    rows = topo.gpus
    return tuple(
        gpu.model_copy(update={"numa_node_topo": rows[gpu.index].numa_node})
        if gpu.index in rows
        else gpu
        for gpu in gpus
    )


def linked(links: tuple[Link, ...], topo: Topo) -> tuple[Link, ...]:
    """Each link with its cell in the matrix, and its NVLinks, which NVML counts one by one."""
    done = []
    for link in links:
        cell = topo.cell(link.a, link.b)
        nvlinks = int(cell[2:]) if cell and cell.startswith("NV") else None
        told = "SYS" if cell == "SOC" else cell
        done.append(link.model_copy(update={"path_in_topo": told, "nvlinks": nvlinks}))
    return tuple(done)


def filled(look: Looking, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Facts that NVML has no call for, from `nvidia-smi -q -x`; asked only if one is missing.

    A card is matched by its PCI address, never by its place in the text.
    """
    if not look.no_such_call or not any(
        getattr(gpu, fact) is None for gpu in gpus for fact in WANTED if gpu.fault is None
    ):
        return gpus
    ran = look.run("nvidia-smi", "-q", "-x")
    told = {card.pci_address: card for card in parse_xml(ran.out)} if ran else {}
    done = []
    for gpu in gpus:
        card = told.get(gpu.pci_address) if gpu.pci_address else None
        missing = {
            fact: value
            for fact, value in (card or Gpu(index=0)).model_dump().items()
            if card and value is not None and getattr(gpu, fact) is None
        }
        done.append(Gpu.model_validate(gpu.model_dump() | missing))
    return tuple(done)
