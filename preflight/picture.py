"""picture(host) -> SVG: sockets, their memory nodes, the GPUs below them, and every link between.

Pure text from facts. What is not known is drawn dashed and says so; measured rates stand on links.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from preflight.checks.check import gib
from preflight.host import Gpu, Host, Link, NumaNode

COLUMN, BOX, GAP, TOP = 300, 260, 20, 70
NODE_HEIGHT, GPU_HEIGHT, GPU_STEP = 92, 74, 130
INK, PAPER, SOFT = "#1f2933", "#ffffff", "#f1f5f9"
COLOURS = {"pcie": "#2563eb", "nvlink": "#15803d", "c2c": "#a16207", "far": "#b91c1c"}


class Spot(NamedTuple):
    """A GPU's box: the middle of its left edge and of its right edge share `y`."""

    x: int
    y: int


def picture(host: Host) -> str:
    """An SVG drawing of the machine, readable without colour: each line carries its words."""
    nodes = [n for n in host.numa_nodes if not n.gpu_memory]
    homeless = [g for g in host.gpus or () if g.numa_node not in {n.index for n in nodes}]
    columns: list[NumaNode | None] = [*nodes, *([None] if homeless or not nodes else [])]
    deepest = max((len(_cards(host, column)) for column in columns), default=0)
    width = max(1, len(columns)) * COLUMN + 2 * GAP
    pairs = len(host.links)
    height = TOP + NODE_HEIGHT + 60 + max(1, deepest) * GPU_STEP + 24 * (pairs + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        _text(GAP, 24, host.label or host.cpu_model or "this machine", bold=True),
        *_sockets(columns),
    ]
    spots: dict[int, Spot] = {}
    for at, column in enumerate(columns):
        x = GAP + at * COLUMN + (COLUMN - BOX) // 2
        parts += _node(column, x)
        parts += _distance(columns, at, x)
        for place, gpu in enumerate(_cards(host, column)):
            y = TOP + NODE_HEIGHT + 60 + place * GPU_STEP
            spots[gpu.index] = Spot(x, y + GPU_HEIGHT // 2)
            parts += _gpu(host, gpu, x, y)
    parts += _between(host.links, spots, height)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cards(host: Host, column: NumaNode | None) -> list[Gpu]:
    known = {n.index for n in host.numa_nodes if not n.gpu_memory}
    if column is None:
        return [g for g in host.gpus or () if g.numa_node not in known]
    return [g for g in host.gpus or () if g.numa_node == column.index]


def _sockets(columns: list[NumaNode | None]) -> Iterator[str]:
    """A band behind the nodes of each socket, where the sockets are known."""
    numbers = [column.socket if column else None for column in columns]
    for socket in dict.fromkeys(n for n in numbers if n is not None):
        first, last = numbers.index(socket), len(numbers) - 1 - numbers[::-1].index(socket)
        x, wide = GAP + first * COLUMN + 6, (last - first + 1) * COLUMN - 12
        yield _box(x, TOP - 30, wide, NODE_HEIGHT + 42, SOFT)
        yield _text(x + 10, TOP - 12, f"socket {socket}")


def _node(node: NumaNode | None, x: int) -> Iterator[str]:
    if node is None:
        yield _box(x, TOP, BOX, NODE_HEIGHT, PAPER, dashed=True)
        yield _text(x + 12, TOP + 26, "node unknown", bold=True)
        return
    yield _box(x, TOP, BOX, NODE_HEIGHT, PAPER)
    yield _text(x + 12, TOP + 22, f"node {node.index}", bold=True)
    cpus = "CPUs unknown" if node.cpus is None else f"CPUs {node.cpus}" if node.cpus else "no CPUs"
    yield _text(x + 12, TOP + 42, cpus if len(cpus) < 36 else cpus[:33] + "...")
    total, free = node.memory_total_bytes, node.memory_free_bytes
    memory = "memory unknown" if total is None else f"{gib(total)} memory"
    yield _text(x + 12, TOP + 61, memory + ("" if free is None else f", {gib(free)} free"))
    pools = [f"{p.total} x {p.page_bytes >> 20} MiB pages" for p in node.huge_pages if p.total]
    yield _text(x + 12, TOP + 80, ", ".join(pools) or "no huge pages reserved")


def _distance(columns: list[NumaNode | None], at: int, x: int) -> Iterator[str]:
    """How far the next node to the right is, in the firmware's units."""
    here = columns[at]
    after = columns[at + 1] if at + 1 < len(columns) else None
    if here is None or after is None or not here.distances or len(here.distances) <= at + 1:
        return
    y = TOP + NODE_HEIGHT // 2
    yield _line(x + BOX, y, x + COLUMN, y, COLOURS["far"])
    yield _text(x + BOX + 6, y - 6, str(here.distances[at + 1]))


def _gpu(host: Host, gpu: Gpu, x: int, y: int) -> Iterator[str]:
    middle = x + BOX // 2
    yield _line(middle, y - 56, middle, y, COLOURS["pcie"], dashed=gpu.pcie_width is None)
    for at, told in enumerate(_road(host, gpu)):
        yield _text(middle + 8, y - 34 + 17 * at, told)
    yield _box(x, y, BOX, GPU_HEIGHT, "#fee2e2" if gpu.fault else SOFT)
    yield _text(x + 12, y + 22, f"GPU {gpu.index}", bold=True)
    name = gpu.fault or gpu.name or "name unknown"
    yield _text(x + 12, y + 42, name if len(name) < 38 else name[:35] + "...")
    size = "memory unknown" if gpu.memory_total_bytes is None else gib(gpu.memory_total_bytes)
    yield _text(x + 12, y + 61, f"{size}   {gpu.pci_address or ''}")


def _road(host: Host, gpu: Gpu) -> list[str]:
    """The link in words, and its measured rate from the GPU's own node."""
    known = gpu.pcie_generation_max is not None and gpu.pcie_width is not None
    told = [f"PCIe {gpu.pcie_generation_max} x{gpu.pcie_width}" if known else "PCIe unknown"]
    for rate in host.measured.links if host.measured else ():
        copy = rate.copy_bytes_per_second
        if rate.gpu == gpu.index and rate.numa_node == gpu.numa_node and copy is not None:
            told.append(f"{copy / 1e9:.1f} GB/s measured")
    return told


def _between(links: tuple[Link, ...], spots: dict[int, Spot], height: int) -> Iterator[str]:
    """A line for each pair of neighbours, and a sentence for each pair."""
    for place, link in enumerate(links):
        one, two = spots.get(link.a), spots.get(link.b)
        kind = "nvlink" if link.nvlinks else "far" if link.path == "SYS" else "pcie"
        told = f"NVLink x{link.nvlinks}" if link.nvlinks else link.path or "unknown"
        if one and two and one.x != two.x and one.y == two.y:
            left, right = sorted((one.x, two.x))
            yield _line(left + BOX, one.y, right, one.y, COLOURS[kind], dashed=link.path is None)
        peer = f", peer access: {link.peer}" if link.peer else ""
        y = height - 24 * (len(links) - place)
        yield _text(GAP, y, f"GPU {link.a} - GPU {link.b}: {told}{peer}")


def _box(x: int, y: int, wide: int, high: int, fill: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return (f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="8" fill="{fill}" '
            f'stroke="{INK}" stroke-opacity="0.45"{dash}/>')  # fmt: skip


def _line(x1: int, y1: int, x2: int, y2: int, colour: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return (
        f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{colour}" stroke-width="2.5" fill="none"{dash}/>'
    )


def _text(x: int, y: int, text: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}"{weight}>{escape(text)}</text>'
