"""How fast host memory is pinned, and whether as much as the plan needs can be."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from preflight.answers import Source, Unreadable
from preflight.host import Host, PinRate, Unread
from preflight.looking import keyed_kib
from preflight.measuring.cuda import Cuda
from preflight.measuring.hostmem import HUGE, SMALL, Area

GIB = 1 << 30
# What the trial leaves to everyone else: the watchdog stops before it is touched.
RESERVE_BYTES = 4 * GIB


def pin_rates(host: Host, cuda: Cuda) -> tuple[tuple[PinRate, ...], tuple[Unread, ...]]:
    """One GiB of each page kind on offer: 4 KiB, transparent huge pages, reserved huge pages."""
    found: list[PinRate] = []
    missed: list[Unread] = []
    kinds = [(SMALL, False), (HUGE, False)]
    kinds += [(p.page_bytes, True) for p in host.memory.huge_pages
              if (p.free or 0) * p.page_bytes >= GIB]  # fmt: skip
    for page_bytes, reserved in kinds:
        try:
            with Area(GIB, page_bytes=page_bytes, reserved=reserved) as area:
                touched = area.touch()
                before = time.perf_counter()
                cuda.register(area.address, GIB)
                registered = time.perf_counter() - before
                cuda.unregister(area.address)
        except (Unreadable, OSError) as error:
            missed.append(Unread(what=f"pin rate, {page_bytes} B pages", reason=str(error)))
        else:
            found.append(PinRate(page_bytes=page_bytes, touch_seconds_per_gib=touched,
                                 register_seconds_per_gib=registered))  # fmt: skip
    return tuple(found), tuple(missed)


class Trial(NamedTuple):
    """Bytes that could be registered, and why it stopped short, if it did."""

    asked_bytes: int
    registered_bytes: int
    stopped: str | None


def trial(
    asked_bytes: int,
    chunk_bytes: int,
    take: Callable[[int], None],
    left_bytes: Callable[[], int | None],
    seconds: float,
    now: Callable[[], float] = time.monotonic,
) -> Trial:
    """Take memory chunk by chunk up to the planned size, and stop before the host is starved.

    `take` pins one chunk of so many bytes and raises Unreadable or OSError where it is refused;
    `left_bytes` tells what the machine and our control group have left (None: stop, since nobody
    can tell). The caller gives everything back.
    """
    got, deadline = 0, now() + seconds
    while got < asked_bytes:
        size = min(chunk_bytes, asked_bytes - got)
        left = left_bytes()
        if left is None:
            return Trial(asked_bytes, got, "the memory that is left cannot be read")
        if left - size < RESERVE_BYTES:
            return Trial(asked_bytes, got, f"only {left / GIB:.1f} GiB are left, and "
                         f"{RESERVE_BYTES / GIB:.0f} GiB stay free")  # fmt: skip
        if now() > deadline:
            return Trial(asked_bytes, got, f"{seconds:.0f} s were over")
        try:
            take(size)
        except (Unreadable, OSError) as error:
            return Trial(asked_bytes, got, str(error))
        got += size
    return Trial(asked_bytes, got, None)


def left_now(source: Source, host: Host) -> int | None:
    """Bytes that may still be taken: the less of the machine's and of our control group's."""
    try:
        available = keyed_kib(source.read("/proc/meminfo")).get("MemAvailable")
    except Unreadable:
        return None
    most, used = host.limits.cgroup_memory_max_bytes, host.limits.cgroup_memory_used_bytes
    if available is None or most is None or most == -1:
        return available
    return min(available, most - (used or 0))


def pin_trial(
    source: Source, host: Host, cuda: Cuda, asked_bytes: int, chunk_bytes: int, seconds: float
) -> Trial:
    """Register the planned bytes for real, then give all of them back."""
    held: list[Area] = []

    def take(size_bytes: int) -> None:
        area = Area(size_bytes)
        try:
            area.touch()
            cuda.register(area.address, size_bytes)
        except (Unreadable, OSError):
            area.close()
            raise
        held.append(area)

    start = left_now(source, host)

    def left() -> int | None:
        # The control group's own count was read once: subtract what this trial took since.
        current = left_now(source, host)
        taken = sum(area.size_bytes for area in held)
        return None if current is None or start is None else min(current, start - taken)

    try:
        return trial(asked_bytes, chunk_bytes, take, left, seconds)
    finally:
        for area in held:
            cuda.unregister(area.address)
            area.close()
