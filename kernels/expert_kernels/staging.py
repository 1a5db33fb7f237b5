"""Host experts on their way to the device for prefill: a ring of slots that the copy engine fills,
as far ahead of the products as there are slots. Two buffers filled in turn made the engine wait: a
batch whose last rows are multiplied a group later keeps its buffer, and 28.5 ms of copying beside
29.6 ms of products took 39.8 ms. An expert that is to be kept is copied to where it stays, and read
there.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from expert_kernels import interface, launch

if TYPE_CHECKING:
    from expert_kernels.ops import ExpertTable


class Staging:
    """A ring of slots for host experts, the stream that fills them and the one that reads them.

    Blocks of the latter go before others that wait, so that the last expert to come is not behind
    the many that were here.
    """

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        self.block_bytes, self.slots = block_bytes, launch.PREFILL_SLOTS
        self.ring = torch.empty(self.slots * block_bytes, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream(device)
        self.urgent = torch.cuda.Stream(device, priority=-1)

    def slot(self, number: int) -> int:
        """Device address of where the `number`-th host expert of a call goes."""
        return self.ring.data_ptr() + number % self.slots * self.block_bytes


_staging: dict[tuple[int, int], Staging] = {}


def prepare(device: torch.device, block_bytes: int) -> Staging:
    """The staging memory for experts of this size: taken now if nobody has, kept for ever."""
    key = (interface.index_of(device), block_bytes)
    if key not in _staging or _staging[key].slots != launch.PREFILL_SLOTS:
        _staging[key] = Staging(device, block_bytes)
    return _staging[key]


def batches(experts: Sequence[int], most: int) -> list[list[int]]:
    """Copied together: one, one, two, four, ... up to `most`, and as few again at the end.

    So the first products wait for little, and little is left to do after the last copy.
    """
    out: list[list[int]] = []
    start = 0
    while start < len(experts):
        size = max(1, min(most, start, (len(experts) - start + 1) // 2))
        out.append(list(experts[start : start + size]))
        start += size
    return out


def reader_of(batches: Sequence[Sequence[int]], batch: int, slots: int) -> int:
    """The last batch that had one of this batch's slots before, -1 if none had."""
    before = sum(map(len, batches[: batch + 1])) - slots
    ends = itertools.accumulate(map(len, batches))
    return next((b for b, end in enumerate(ends) if before <= end), -1) if before > 0 else -1


class Trellises:
    """Device addresses of each touched expert's trellises, and the copies that put them there.

    `rows` and `kept` are by row of the table: addresses of the trellises as they are now, and where
    an expert is to be kept, 0 or less: nowhere. Batches are waited for and released in order.
    """

    def __init__(
        self,
        lib: ctypes.CDLL,
        table: ExpertTable,
        touched: Sequence[int],
        rows: Sequence[Sequence[int]],
        kept: Sequence[int],
    ) -> None:
        device = table.addresses.device
        self.lib, self.rows = lib, rows
        self.sizes = [int(table.hidden_size * table.intermediate_size * b) // 8 for b in table.bits]
        self.kept = {e: kept[e] for e in touched if kept[e] > 0}
        begin, end = table.host_range
        host = [e for e in touched if begin <= rows[e][0] < end]
        self.batches = batches(host, min(launch.PREFILL_BATCH, launch.PREFILL_SLOTS))
        self.batch_of = {e: b for b, batch in enumerate(self.batches) for e in batch}
        self.number = {e: i for i, e in enumerate(host)}
        self.filled: list[torch.cuda.Event] = []  # of the batches copied
        self.read: list[torch.cuda.Event] = []  # of the batches released
        self.copied_bytes = sum(self.sizes) * len(host)
        self.caller = self.urgent = torch.cuda.current_stream(device)
        self.staging = prepare(device, sum(self.sizes)) if host else None
        if self.staging is not None:
            self.urgent = self.staging.urgent
            # What an earlier call still reads from the buffers, this stream has ordered before.
            self.staging.stream.wait_stream(self.caller)
        # 4 ms of copies at 13 MB each, until the products are planned: with 2 the copy engine
        # waited 1.7 for a slow host. What the plan copies to the device comes behind them.
        self.copy_ahead(5)

    def of(self, expert: int) -> list[int]:
        """Where the expert's trellises are while it is multiplied."""
        base = self._target(expert)
        if base is None:
            return list(self.rows[expert])
        return [base, base + self.sizes[0], base + self.sizes[0] + self.sizes[1]]

    def wait_for(self, batch: int) -> None:
        """Work enqueued from now on finds the batch copied."""
        assert batch < len(self.filled), "a wait for a copy that is not enqueued is for nothing"
        self.urgent.wait_event(self.filled[batch])

    def release(self, batch: int) -> None:
        """All that reads this batch is enqueued: its slots take the experts that come next."""
        assert batch == len(self.read), "batches are released in order"
        self.read.append(self.urgent.record_event())
        self.copy_ahead(len(self.batches))

    def keep(self) -> None:
        """Experts that were read where they are, to where they are to be kept as well."""
        for expert in self.kept.keys() - self.batch_of.keys():
            self._copy_expert(expert, self.kept[expert], self.caller.cuda_stream)

    def _target(self, expert: int) -> int | None:
        """Where a host expert is copied: to where it is to be kept, else to its slot."""
        if expert not in self.number:
            return None
        assert self.staging is not None
        return self.kept.get(expert, self.staging.slot(self.number[expert]))

    def copy_ahead(self, most: int) -> None:
        """Enqueue batches, up to the `most`-th, whose slots' earlier reads are enqueued already."""
        while (batch := len(self.filled)) < min(most, len(self.batches)):
            assert self.staging is not None
            reader = reader_of(self.batches, batch, self.staging.slots)
            if reader >= len(self.read):
                return
            if reader >= 0:
                self.staging.stream.wait_event(self.read[reader])
            for expert in self.batches[batch]:
                to = self._target(expert)
                assert to is not None
                self._copy_expert(expert, to, self.staging.stream.cuda_stream)
            self.filled.append(self.staging.stream.record_event())

    def _copy_expert(self, expert: int, to: int, stream: int) -> None:
        gate, up, down = self.rows[expert]
        a, b, c = self.sizes
        pieces = [(gate, a), (up, b), (down, c)]
        if (up, down) == (gate + a, gate + a + b):
            pieces = [(gate, a + b + c)]  # behind each other
        for source, size in pieces:
            code = self.lib.experts_copy(to, source, size, stream)
            interface.check(self.lib, code, f"copy of {size:,} bytes of expert {expert}")
            to += size
