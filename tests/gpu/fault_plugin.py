"""Our plugin with one fault in it, named by the variable FAULT: the engine of `faults.py`."""

from __future__ import annotations

import os
from typing import Any

CHUNK_BYTES, REFUSED_CHUNK = 256 << 10, 3
MAP_NORESERVE = 0x4000  # mman.h: nothing is set aside, so a page may be missing when it is touched
STEPS = 20
# Shared, anonymous, at this place, with no right to anything: nobody can pin that.
NOBODYS = 0x01 | 0x20 | 0x10


def register() -> None:
    from appliance.engine import register as ours

    ours()
    FAULTS[os.environ["FAULT"]]()


def refuse_a_chunk() -> None:
    """Chunk 3 is nobody's memory when the driver is to pin it: the kernel refuses the driver."""
    from appliance.engine import pinning
    from appliance.engine.hostmem import libc

    real, calls = pinning.Driver.register, [0]

    def register(driver: Any, address: int, size_bytes: int, *, read_only: bool = False) -> int:
        if calls[0] == REFUSED_CHUNK:
            libc.mmap(address, size_bytes, 0, NOBODYS, -1, 0)
        calls[0] += 1
        return real(driver, address, size_bytes, read_only=read_only)

    pinning.chunks.__defaults__ = (CHUNK_BYTES,)
    pinning.Driver.register = register  # type: ignore[method-assign]


def no_huge_pages() -> None:
    """The node's huge pages were counted as free and are gone when they are touched."""
    from appliance.engine import hostmem

    hostmem._page_kind = lambda size, node: "hugetlb"  # type: ignore[assignment]
    hostmem._MAP_HUGETLB_2MB |= MAP_NORESERVE


def cut_a_shard() -> None:
    """A shard ends early, since the launcher read its header."""
    os.truncate(os.environ["FAULT_FILE"], int(os.environ["FAULT_BYTES"]))


def lose_the_gpu() -> None:
    """After some steps a kernel traps, which no later call to the device survives."""
    import torch

    from appliance.engine.cache import SlotCache

    real, steps = SlotCache.before_step, [0]

    def before_step(cache: SlotCache) -> None:
        real(cache)
        steps[0] += cache.started
        if steps[0] == STEPS:
            device = cache.book.numbers.device
            if device.type == "cpu":
                raise RuntimeError("CUDA error: a device that this machine has not")
            torch.zeros(1, device=device)[torch.full((1,), 7, device=device)]

    SlotCache.before_step = before_step  # type: ignore[method-assign]


FAULTS = {
    "chunk": refuse_a_chunk,
    "huge-pages": no_huge_pages,
    "shard": cut_a_shard,
    "lost-gpu": lose_the_gpu,
    "none": lambda: None,
}
