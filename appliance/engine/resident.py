"""Where this process's pages are and how large: what the kernel says of them in /proc. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_HUGE_SHARE = 0.9  # of the resident bytes, to be called huge: a mapping's ends may be small pages


def available_bytes() -> int | None:
    """MemAvailable; None where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def pages_by_node(address: int, size_bytes: int) -> dict[int, int]:
    """Resident pages of [address, address + size_bytes) per node, from /proc/self/numa_maps.

    move_pages is refused in containers, numa_maps is not (PLATFORM). Pages are counted in the
    kernel's own page size of each range. {} where the kernel has no NUMA.
    """
    found: dict[int, int] = {}
    ranges = list(_numa_ranges())
    # A line has no end: it reaches to the next one at most. Neighbours of equal policy share one.
    ends = [start for start, _ in ranges[1:]] + [address + size_bytes]
    for (start, fields), end in zip(ranges, ends, strict=False):  # no range has one end, too
        if end <= address or start >= address + size_bytes:
            continue
        for name, _, value in (field.partition("=") for field in fields):
            if name[:1] == "N" and name[1:].isdecimal():
                found[int(name[1:])] = found.get(int(name[1:]), 0) + int(value)
    return found


def _numa_ranges() -> Iterator[tuple[int, list[str]]]:
    try:
        text = Path("/proc/self/numa_maps").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        start, *fields = line.split()
        yield int(start, 16), fields


def huge_and_resident(address: int, size_bytes: int) -> tuple[int, int] | None:
    """Bytes on transparent huge pages, and resident bytes, of the mappings that overlap
    [address, address + size_bytes), from /proc/self/smaps. None where the kernel does not say."""
    try:
        text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    huge = resident = 0
    said = inside = False
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if not name.endswith(":"):
            start, _, end = name.partition("-")
            inside = int(start, 16) < address + size_bytes and address < int(end, 16)
        elif inside and name == "Rss:":
            resident += int(value.split()[0]) * 1024
        elif inside and name == "AnonHugePages:":
            huge, said = huge + int(value.split()[0]) * 1024, True
    return (huge, resident) if said else None


def is_mostly_huge(address: int, size_bytes: int) -> bool:
    found = huge_and_resident(address, size_bytes)
    return found is not None and found[0] >= _HUGE_SHARE * found[1] > 0
