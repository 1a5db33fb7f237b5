"""`numactl --hardware` and `lscpu`: memory nodes and CPUs as text. Edited text is refused whole."""

from __future__ import annotations

import re
from typing import NamedTuple

from preflight.host import NumaNode
from preflight.looking import ids

MIB = 1 << 20
CPUS = re.compile(r"^node (\d+) cpus:(.*)$")
SIZE = re.compile(r"^node (\d+) (size|free): (\d+) MB$")
NUMBERS = re.compile(r"\d+(?: \d+)*")
ROW = re.compile(r"^(\d+):((?:\s+\d+)+)$")


def parse_numactl(text: str) -> tuple[NumaNode, ...]:
    """The nodes, or () where the text is none of numactl's or was edited (`...` in a list)."""
    cpus: dict[int, list[str]] = {}
    sizes: dict[tuple[int, str], int] = {}
    rows: dict[int, tuple[int, ...]] = {}
    open_list: int | None = None
    whole: set[int] = set()
    stray = False
    # A last line without its end may be cut inside a number.
    for raw in text.replace("\r", "").splitlines(keepends=True):
        line = raw.strip() if raw.endswith("\n") else ""
        if match := CPUS.match(line):
            open_list = int(match.group(1))
            cpus[open_list] = match.group(2).split()
        elif match := SIZE.match(line):
            index = int(match.group(1))
            sizes[index, match.group(2)] = int(match.group(3)) * MIB
            if index == open_list:
                # Only now the list is known to be whole: it may go on over several lines.
                whole.add(index)
            open_list = None
        elif match := ROW.match(line):
            rows[int(match.group(1))] = tuple(map(int, match.group(2).split()))
            open_list = None
        elif open_list is not None and _goes_on(cpus[open_list], line):
            cpus[open_list] += line.split()
        elif line == "...":
            return ()
        elif line:
            open_list = None
            # A piece of some list, away from it: none can be trusted to be whole.
            stray = stray or NUMBERS.fullmatch(line) is not None
    if any(not word.isdecimal() for words in cpus.values() for word in words):
        return ()
    return tuple(
        NumaNode(
            index=index,
            cpus=",".join(cpus[index]) if index in whole and not stray else None,
            memory_total_bytes=sizes.get((index, "size")),
            memory_free_bytes=sizes.get((index, "free")),
            distances=rows.get(index) if len(rows.get(index, ())) == len(cpus) else None,
        )
        for index in sorted(cpus)
    )


def _goes_on(so_far: list[str], line: str) -> bool:
    """Whether a line of numbers continues a CPU list: one that has begun, and upwards."""
    numbers = bool(so_far) and NUMBERS.fullmatch(line) is not None
    return numbers and so_far[-1].isdecimal() and int(line.split()[0]) > int(so_far[-1])


class Lscpu(NamedTuple):
    """What lscpu said: the model, CPU lists, and nodes without their memory."""

    model: str | None
    online: str | None
    offline: str | None
    nodes: tuple[NumaNode, ...]


def parse_lscpu(text: str) -> Lscpu:
    """Read lscpu's table wherever it stands in the text."""
    told: dict[str, str] = {}
    nodes = []
    for line in text.replace("\r", "").splitlines():
        name, colon, value = line.partition(":")
        if not colon:
            continue
        told.setdefault(name.strip(), value.strip())
        match = re.fullmatch(r"NUMA node(\d+) CPU\(s\)", name.strip())
        if match and ids(value) is not None:
            nodes.append(NumaNode(index=int(match.group(1)), cpus=value.strip()))
    unique = {node.index: node for node in nodes}
    online, offline = (told.get(f"{word} CPU(s) list") for word in ("On-line", "Off-line"))
    return Lscpu(
        model=told.get("Model name"),
        online=online if ids(online) else None,
        offline=offline if ids(offline) else None,
        nodes=tuple(unique[index] for index in sorted(unique)),
    )
