"""`nvidia-smi topo -m`: tokens, never columns. A cell is right or None.

The tool truncates and shifts cells, glues columns and prints colours into pipes, so CPU lists and
NUMA nodes are taken from sysfs; what it says here is only compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|(?<!\S)\[[0-9;]*m(?=GPU)|(?<=ID)\[0m")
CELL = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS|SOC|X")
CELLS = re.compile(rf"(?:{CELL.pattern})+")
DEVICE = re.compile(r"GPU\d+|NIC\d+|mlx\d+_\w+|[a-z][\w.-]*\d")
GLUED_DEVICES = re.compile(r"(?:(?:GPU|NIC)\d+)+")
CPU_LIST = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")
UNSUPPORTED = "the topology is not available on this driver or system"


@dataclass(frozen=True)
class TopoRow:
    """One device's line. `cells` by the other device's name; affinities None where not certain."""

    name: str
    cells: dict[str, str] = field(default_factory=dict)
    cpus: str | None = None
    numa_node: int | None = None
    gpu_numa_id: int | None = None


@dataclass(frozen=True)
class Topo:
    """The first matrix in a text. `error` says what is wrong or missing, if anything."""

    columns: tuple[str, ...] = ()
    rows: dict[str, TopoRow] = field(default_factory=dict)
    error: str | None = None

    @property
    def gpus(self) -> dict[int, TopoRow]:
        return {int(n[3:]): row for n, row in self.rows.items() if n.startswith("GPU")}

    @property
    def gpu_count(self) -> int:
        """Cards in the header: rows may be missing."""
        return sum(name.startswith("GPU") for name in self.columns)

    def cell(self, a: int, b: int) -> str | None:
        """The link between two cards; None where either row is unsure or they contradict."""
        one, two = (
            self.rows[f"GPU{x}"].cells.get(f"GPU{y}") if f"GPU{x}" in self.rows else None
            for x, y in ((a, b), (b, a))
        )
        return one if two is None or one == two else (two if one is None else None)


def parse_topo(text: str) -> Topo:
    """Read what `topo -m` printed, wherever it stands in the text. Never raises."""
    lines = [ANSI.sub("", line).split() for line in text.splitlines()]
    start = next((n for n, words in enumerate(lines) if _header(words)), None)
    if start is None:
        return Topo(error=UNSUPPORTED if text.strip() else "nothing was printed")
    header = _header(lines[start]) or []
    affinities = _affinities(" ".join(lines[start]))
    rows: dict[str, TopoRow] = {}
    for n, words in enumerate(lines[start + 1 :], start + 1):
        if not words:
            continue
        if words[0] not in header or _header(words) or words[0] in rows:
            break
        # The end of the text may have cut the last line anywhere, even inside a number.
        cut = n == len(lines) - 1 and not text.endswith("\n")
        row = _row(words, header, affinities, cut)
        if row is None:
            break
        rows[row.name] = row
    return Topo(columns=tuple(header), rows=rows, error=_problem(header, rows))


def _header(words: list[str]) -> list[str] | None:
    """The devices of a header line, or None. A row has a link where a header has a name."""
    names: list[str] = []
    for word in words:
        glued = re.match(GLUED_DEVICES, word)
        if glued:
            names += re.findall(r"(?:GPU|NIC)\d+", glued.group())
            if glued.group() != word:
                return names if word[glued.end() :] in ("CPU", "NUMA") else None
        elif word in ("CPU", "NUMA", "GPU"):
            break
        elif DEVICE.fullmatch(word) and names:
            names.append(word)
        else:
            return None
    complete = len(set(names)) == len(names)
    return names if names and names[0].startswith("GPU") and complete else None


def _affinities(header: str) -> list[str]:
    titles = {"cpus": "CPU Affinity", "numa": "NUMA Affinity", "gpu": "GPU NUMA ID"}
    return [name for name, title in titles.items() if title in header]


def _row(words: list[str], header: list[str], affinities: list[str], cut: bool) -> TopoRow | None:
    name = words[0]
    cells: list[str] = []
    rest: list[str] = []
    for at, word in enumerate(words[1:], 1):
        if len(cells) < len(header) and CELLS.fullmatch(word):
            cells += CELL.findall(word)
        else:
            rest = words[at:]
            break
    if not cells:
        return None
    own = header.index(name)
    if len(cells) != len(header):
        # A cell is lost somewhere: only those before our own X can be placed.
        placed = cells[:own] if own < len(cells) and cells[own] == "X" else []
        return TopoRow(name, dict(zip(header, placed, strict=False)))
    if cells[own] != "X" or cells.count("X") != 1:
        return TopoRow(name)
    if cut:
        return TopoRow(name, dict(zip(header[:-1], cells[:-1], strict=True)))
    found = dict(zip(header, cells, strict=True))
    return TopoRow(name, found, **_placed(rest, affinities))  # type: ignore[arg-type]


def _placed(rest: list[str], affinities: list[str]) -> dict[str, object]:
    """Affinity words to their titles, only where their number leaves no doubt."""
    if len(rest) == len(affinities):
        told = dict(zip(affinities, rest, strict=True))
    elif rest == ["N/A"] and affinities[-1:] == ["gpu"]:
        told = {"gpu": "N/A"}
    else:
        return {}
    return {
        "cpus": _cpus(told.get("cpus", "")),
        "numa_node": _number(told.get("numa", "")),
        "gpu_numa_id": _number(told.get("gpu", "")),
    }


def _number(word: str) -> int | None:
    """A node; `0-1` and `N/A` are no node."""
    return int(word) if word.isascii() and word.isdecimal() else None


def _cpus(word: str) -> str | None:
    """A CPU list; one of single, evenly spaced CPUs is a list that the tool cut short."""
    if not CPU_LIST.fullmatch(word):
        return None
    return None if "," in word and "-" not in word else word


def _problem(header: list[str], rows: dict[str, TopoRow]) -> str | None:
    cards = [name for name in header if name.startswith("GPU")]
    missing = [name for name in cards if name not in rows]
    unsure = [n for n in cards if n in rows and len(rows[n].cells) != len(header)]
    if missing:
        return f"the matrix is incomplete: no row for {', '.join(missing)}"
    return f"the matrix is damaged in the rows of {', '.join(unsure)}" if unsure else None
