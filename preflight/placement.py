"""Where pages really are: /proc/PID/numa_maps is the proof that a binding took hold.

move_pages is refused in containers; numa_maps is not. Binding calls that fail without a word, or
come after the first touch, show here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NODE = re.compile(r"^N(\d+)=(\d+)$")


class Mapping(NamedTuple):
    """One line of numa_maps: its start address, page size, and bytes on each node."""

    start: int
    policy: str
    page_bytes: int
    bytes_by_node: dict[int, int]


class Home(NamedTuple):
    """A range that the plan puts on one node: `size_bytes` from `start`, an address."""

    name: str
    start: int
    size_bytes: int
    node: int


class Placed(NamedTuple):
    """What was found of one home: bytes on its node, bytes on others, bytes not there at all."""

    home: Home
    right_bytes: int
    wrong_bytes_by_node: dict[int, int]
    missing_bytes: int

    @property
    def proved(self) -> bool:
        return not self.wrong_bytes_by_node and self.missing_bytes == 0

    @property
    def sentence(self) -> str:
        """What is wrong with it, with the numbers; empty where it is proved."""
        if self.proved:
            return ""
        wrong = ", ".join(f"{b:,} B on node {n}" for n, b in self.wrong_bytes_by_node.items())
        missing = f"{self.missing_bytes:,} B never touched" if self.missing_bytes else ""
        told = ", ".join(part for part in (wrong, missing) if part)
        return (
            f"{self.home.name}: of {self.home.size_bytes:,} B planned on node {self.home.node}, "
            f"{self.right_bytes:,} B are there; {told}"
        )


def parse_numa_maps(text: str) -> tuple[Mapping, ...]:
    """Every mapping with pages; a line in an unknown layout is left out."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 2 or not re.fullmatch(r"[0-9a-f]+", words[0]):
            continue
        sizes = [word for word in words if word.startswith("kernelpagesize_kB=")]
        size = sizes[0].partition("=")[2] if sizes else ""
        nodes = [match.groups() for match in map(NODE.match, words) if match]
        if size.isdecimal() and nodes:
            page = int(size) * 1024
            by_node = {int(node): int(pages) * page for node, pages in nodes}
            found.append(Mapping(int(words[0], 16), words[1], page, by_node))
    return tuple(found)


def prove(numa_maps: str, homes: Iterable[Home]) -> tuple[Placed, ...]:
    """Compare each home with the mappings that start inside it.

    A home must be mappings of its own (an mmap made for it): numa_maps counts whole mappings.
    """
    mappings = parse_numa_maps(numa_maps)
    return tuple(_placed(home, mappings) for home in homes)


def _placed(home: Home, mappings: Sequence[Mapping]) -> Placed:
    by_node: dict[int, int] = {}
    for mapping in mappings:
        if home.start <= mapping.start < home.start + home.size_bytes:
            for node, size in mapping.bytes_by_node.items():
                by_node[node] = by_node.get(node, 0) + size
    right = by_node.pop(home.node, 0)
    there = right + sum(by_node.values())
    return Placed(home, right, by_node, max(0, home.size_bytes - there))


def prometheus(placed: Iterable[Placed]) -> str:
    """Bytes of each home on each node, for node_exporter's textfile collector."""
    lines = [
        "# HELP moe_appliance_placement_bytes bytes of a home found on a memory node",
        "# TYPE moe_appliance_placement_bytes gauge",
    ]
    for each in placed:
        found = {each.home.node: each.right_bytes} | each.wrong_bytes_by_node
        lines += [
            f'moe_appliance_placement_bytes{{home="{each.home.name}",node="{node}",'
            f'planned="{each.home.node}"}} {size}'
            for node, size in sorted(found.items())
        ]
    return "\n".join(lines) + "\n"
