"""Links between GPUs: NVML says, `nvidia-smi topo -m` is the witness."""

from __future__ import annotations

from preflight.host import Link
from preflight.looking import Looking
from preflight.witness.topo import parse_topo


def witnessed(look: Looking, links: tuple[Link, ...]) -> tuple[tuple[Link, ...], str | None]:
    """The links with what topo -m says of them, and why it says nothing, if so."""
    if not links:
        return links, None
    ran = look.run("nvidia-smi", "topo", "-m")
    if ran is None:
        return links, "nvidia-smi is not installed or did not answer"
    topo = parse_topo(ran.out)
    if not topo.rows:
        return links, topo.error or "no matrix in what nvidia-smi printed"
    done = []
    for link in links:
        cell = topo.cell(link.a, link.b)
        nvlinks = int(cell[2:]) if cell and cell.startswith("NV") else None
        done.append(link.model_copy(update={"path_in_topo": cell, "nvlinks": nvlinks}))
    return tuple(done), topo.error
