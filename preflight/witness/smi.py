"""nvidia-smi as text: the table, -q, -L and CSV. Nothing here ever raises.

A card nobody can number keeps its place in the text; a value in a layout unknown here is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from preflight.host import Gpu, GpuProcess
from preflight.probes.pci import sysfs_address
from preflight.witness import fields
from preflight.witness.words import fault, known, size, switch, value

CSV_NAMES = {str(row[fields.CSV]) for row in fields.FIELDS.values()} - {""}
UNITED = re.compile(r"^(.*?)\s*\[[^\]]*\]$")
# Sections of -q in the order that every driver prints them.
SECTIONS = ("Product Name", "GPU UUID", "PCI", "FB Memory Usage", "BAR1 Memory Usage",
            "Utilization", "Temperature", "Clocks", "Max Clocks")  # fmt: skip
CARD_LINE = re.compile(
    r"^\|\s*(\d+)\s+(\S.*?)\s+(On|Off|N/A|WDDM|TCC|MCDM)\s*\|\s*([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f]+\.\d)\s"
)
USAGE = re.compile(r"(\d+)MiB\s*/\s*(\d+)MiB")
SLICE = re.compile(r"^\|\s*(\d+)\s+\d+\s+\d+\s+\d+\s*\|\s*(\d+)MiB\s*/\s*(\d+)MiB")
PROCESS = re.compile(
    r"^\|\s*(\d+)\s+(?:N/A|\d+)?\s*(?:N/A|\d+)?\s+(\d+)\s+[CGM+]+\s.*?(\d+MiB|N/A)\s*\|"
)
CARD_OF_LIST = re.compile(r"^GPU (\d+): (.+?) \(UUID: (GPU-[0-9a-fA-F-]+)\)")


def parse_q(text: str) -> tuple[Gpu, ...]:
    """Cards of `nvidia-smi -q`: by indentation, since MIG devices repeat a card's sections."""
    cards: list[tuple[dict[str, str | None], list[int | None]]] = []
    sections: list[list[str]] = []
    stack: list[tuple[int, str]] = []
    for line in text.replace("\r", "").splitlines():
        indent = len(line) - len(line.lstrip())
        name, colon, told = line.strip().partition(" :")
        name = name.strip()
        if indent == 0:
            if re.match(r"GPU [0-9A-Fa-f]{4,8}:", line):
                cards.append(({}, []))
                sections.append([])
            stack = []
        if not cards or not name or indent == 0:
            continue
        while stack and stack[-1][0] >= indent:
            stack.pop()
        if not stack and (name in SECTIONS or not sections[-1]):
            sections[-1].append(name)
        path = "/".join([*(n for _, n in stack), name])
        if not colon:
            stack.append((indent, name))
        elif path.startswith("MIG Device/"):
            if path.endswith("FB Memory Usage/Total"):
                cards[-1][1].append(size(told))
        else:
            cards[-1][0].setdefault(path, told.strip())
    found = []
    for n, (facts, slices) in enumerate(cards):
        in_order = [name for name in SECTIONS if name in sections[n]]
        if sections[n] != in_order or in_order[:1] != ["Product Name"]:
            # Lines in another order: what stands below what is no longer known.
            facts, slices = {}, []
        device = facts.get("PCI/Device Id")
        extra = {
            "mig_slices_bytes": known(slices),
            "compute_capability": fields.capability(facts.get("Product Architecture"), device),
        }
        found.append(fields.gpu(n, facts, fields.TEXT).model_copy(update=extra))
    return tuple(found)


def parse_csv(text: str) -> tuple[Gpu, ...]:
    """Rows of `--query-gpu ... --format=csv`, by the names of its header.

    Without a header only what names itself is read: a UUID, and words that mean a fault.
    """
    header: list[str] | None = None
    units: list[str] = []
    found: list[Gpu] = []
    for line in text.replace("\r", "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        names = [_bare(cell) for cell in cells]
        if len(CSV_NAMES & set(names)) >= 2 or (names[0] == "index" and len(names) > 1):
            header, units = names, [_unit(cell) for cell in cells]
        elif header and len(cells) == len(header):
            whole = [
                f"{c} {u}".strip() if c.isdecimal() else c
                for c, u in zip(cells, units, strict=True)
            ]
            told: dict[str, str | None] = dict(zip(header, whole, strict=True))
            index = told.get("index") or ""
            number = int(index) if index.isdecimal() else len(found)
            found.append(fields.gpu(number, told, fields.CSV))
        elif header is None and len(cells) > 2 and cells[0].isdecimal():
            uuid = next((cell for cell in cells if cell.startswith("GPU-")), None)
            broken = next((b for b in map(fault, cells) if b), None)
            if uuid or broken:
                found.append(Gpu(index=int(cells[0]), uuid=uuid, fault=broken))
    return tuple(found)


def _unit(name: str) -> str:
    """`memory.total [MiB]` -> `MiB`: with nounits only the header says it."""
    return name[name.rfind("[") + 1 : -1] if name.endswith("]") else ""


def _bare(name: str) -> str:
    match = UNITED.match(name)
    return match.group(1) if match else name


def parse_table(text: str) -> tuple[Gpu, ...]:
    """Cards of the plain table. Its names are cut to fit, so only sizes and switches are facts."""
    lines = text.replace("\r", "").splitlines()
    slices: dict[int, list[int | None]] = {}
    for line in lines:
        if match := SLICE.match(line):
            slices.setdefault(int(match.group(1)), []).append(int(match.group(3)) << 20)
    held = _processes(lines)
    found = []
    for block in _blocks(lines):
        card = _table_card(block)
        extra = {"mig_slices_bytes": known(slices.get(card.index, []))}
        found.append(card.model_copy(update=extra | {"processes": held(card.index)}))
    return tuple(found) or _fragment(lines, held(0))


def _fragment(lines: list[str], held: tuple[GpuProcess, ...] | None) -> tuple[Gpu, ...]:
    """A broken card's usage line pasted alone: that it is broken is known, who it is is not."""
    for line in lines:
        usage = USAGE.search(line)
        if usage and fault(line):
            used, total = (int(g) << 20 for g in usage.groups())
            return (
                Gpu(
                    index=0,
                    memory_used_bytes=used,
                    memory_total_bytes=total,
                    fault=fault(line),
                    processes=held,
                ),
            )
    return ()


def _blocks(lines: list[str]) -> Iterator[list[str]]:
    """The two or three lines of each card."""
    for n, line in enumerate(lines):
        if CARD_LINE.match(line):
            block = [line]
            for after in lines[n + 1 : n + 3]:
                if not after.startswith("|") or CARD_LINE.match(after):
                    break
                block.append(after)
            yield block


def _table_card(block: list[str]) -> Gpu:
    match = CARD_LINE.match(block[0])
    assert match is not None  # _blocks yields no other line
    usage = USAGE.search(block[1]) if len(block) > 1 else None
    used, total = (int(g) << 20 for g in usage.groups()) if usage else (None, None)
    cells = [cell.strip() for cell in block[-1].strip("|").split("|")]
    name = value(match.group(2))
    return Gpu(
        index=int(match.group(1)),
        name=None if name is None or name.endswith("...") else name,
        pci_address=sysfs_address(match.group(4)),
        persistence=switch(match.group(3)),
        memory_used_bytes=used,
        memory_total_bytes=total,
        mig_enabled=switch(cells[-1]) if len(block) == 3 else None,
        fault=next((b for b in map(fault, block) if b), None),
    )


def _processes(lines: list[str]) -> Callable[[int], tuple[GpuProcess, ...] | None]:
    """A function from a card's index to its processes, or None where the text shows no list."""
    found: dict[int, list[GpuProcess]] = {}
    for line in lines:
        if match := PROCESS.match(line):
            used = size(match.group(3).replace("MiB", " MiB"))
            found.setdefault(int(match.group(1)), []).append(
                GpuProcess(pid=int(match.group(2)), used_bytes=used)
            )
    listed = any("Processes:" in line or "No running processes" in line for line in lines)
    return lambda index: tuple(found.get(index, ())) if listed else None


def parse_list(text: str) -> tuple[Gpu, ...]:
    """Cards of `nvidia-smi -L`; a card with MIG lines below it is cut into slices."""
    found: list[Gpu] = []
    for line in text.replace("\r", "").splitlines():
        if match := CARD_OF_LIST.match(line.strip()):
            index, name, uuid = match.groups()
            found.append(Gpu(index=int(index), name=value(name), uuid=uuid))
        elif found and line.strip().startswith("MIG ") and "UUID: MIG-" in line:
            found[-1] = found[-1].model_copy(update={"mig_enabled": True})
    return tuple(found)
