"""Copy and in-place read rates of each GPU against each memory node, alone and all at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from preflight.answers import Source, Unreadable
from preflight.host import Host, LinkRate, Unread
from preflight.measuring.cuda import Cuda
from preflight.measuring.hostmem import Area
from preflight.nearest import host_memory_nodes

AREA_BYTES = 256 << 20
# Enough work that the link is at speed and the clock's grain does not matter: about half a second.
ROUNDS = 100
WARM_ROUNDS = 8


class Rig:
    """One GPU with a buffer of its own and one area of host memory."""

    def __init__(self, cuda: Cuda, area: Area) -> None:
        self.cuda, self.area = cuda, area
        self.buffer: Any = cuda.allocate(area.size_bytes)

    def copy(self, rounds: int) -> tuple[Any, Any, int]:
        """Queue copies; (first event, last event, bytes)."""
        self.cuda.current()
        first = self.cuda.mark()
        for _ in range(rounds):
            self.cuda.queue_copy(self.buffer, self.area.address, self.area.size_bytes)
        return first, self.cuda.mark(), rounds * self.area.size_bytes

    def read(self, rounds: int) -> tuple[Any, Any, int]:
        self.cuda.current()
        first, total = self.cuda.mark(), 0
        for _ in range(rounds):
            total += self.cuda.queue_read(self.area.address, self.area.size_bytes, self.buffer)
        return first, self.cuda.mark(), total

    def rate(self, work: tuple[Any, Any, int]) -> float:
        self.cuda.current()
        first, last, size_bytes = work
        return size_bytes / self.cuda.seconds(first, last)


def link_rates(source: Source, host: Host) -> tuple[tuple[LinkRate, ...], tuple[Unread, ...]]:
    """Each GPU against each memory node, one pair at a time."""
    found: list[LinkRate] = []
    missed: list[Unread] = []
    for gpu in host.gpus or ():
        for node in host_memory_nodes(host):
            what = f"rates of GPU {gpu.index} from node {node.index}"
            try:
                with rig(gpu.index, node.index) as one:
                    found.append(_pair(source, one, gpu.index, node.index))
            except (Unreadable, OSError) as error:
                missed.append(Unread(what=what, reason=str(error)))
    return tuple(found), tuple(missed)


@contextmanager
def rig(index: int, node: int | None) -> Iterator[Rig]:
    """A GPU and pinned memory of one node, given back afterwards."""
    cuda = Cuda(index)
    try:
        with Area(AREA_BYTES, node=node) as area:
            area.touch()
            cuda.register(area.address, area.size_bytes)
            try:
                made = Rig(cuda, area)
                yield made
                cuda.free(made.buffer)
            finally:
                cuda.unregister(area.address)
    finally:
        cuda.close()


def _pair(source: Source, one: Rig, index: int, node: int) -> LinkRate:
    one.rate(one.copy(WARM_ROUNDS))
    work = one.copy(ROUNDS)
    # Asked while the copies run: an idle link is slower by design.
    generation, width = _link_now(source, index)
    copied = one.rate(work)
    one.rate(one.read(WARM_ROUNDS))
    read = one.rate(one.read(ROUNDS))
    return LinkRate(
        gpu=index,
        numa_node=node,
        copy_bytes_per_second=round(copied),
        zero_copy_bytes_per_second=round(read),
        pcie_generation=generation,
        pcie_width=width,
    )


def _link_now(source: Source, index: int) -> tuple[int | None, int | None]:
    told: list[int | None] = []
    for call in ("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth"):
        try:
            told.append(int(source.nvml(call, (index,))))
        except Unreadable:
            told.append(None)
    return told[0], told[1]


def rates_together(host: Host) -> tuple[tuple[LinkRate, ...], tuple[Unread, ...]]:
    """Every GPU from its own node at the same time; nothing to tell with fewer than two."""
    cards = host.gpus or ()
    if len(cards) < 2:
        return (), ()
    held: list[Any] = []
    try:
        rigs = []
        for gpu in cards:
            manager = rig(gpu.index, gpu.numa_node)
            rigs.append(manager.__enter__())
            held.append(manager)
        for one in rigs:
            one.rate(one.copy(WARM_ROUNDS))
        work = [one.copy(ROUNDS) for one in rigs]
        return tuple(
            LinkRate(gpu=gpu.index, numa_node=gpu.numa_node or 0,
                     copy_bytes_per_second=round(one.rate(done)))
            for gpu, one, done in zip(cards, rigs, work, strict=True)
        ), ()  # fmt: skip
    except (Unreadable, OSError) as error:
        return (), (Unread(what="rates of all GPUs at once", reason=str(error)),)
    finally:
        for manager in reversed(held):
            manager.__exit__(None, None, None)
