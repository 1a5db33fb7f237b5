"""Host experts on their way to the device for prefill: two buffers that the copy engine fills in
turn, the next batch under the products of this one. An expert that is to be kept is copied to where
it stays, and read there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from expert_kernels import cuda, launch

if TYPE_CHECKING:
    from expert_kernels.ops import ExpertTable


class Staging:
    """Two buffers for batches of host experts, and the stream that fills them."""

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        size = launch.PREFILL_BATCH * block_bytes
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self.stream = torch.cuda.Stream(device)
        self.filled = [torch.cuda.Event() for _ in range(2)]
        self.read = [torch.cuda.Event() for _ in range(2)]


_staging: dict[tuple[int, int], Staging] = {}


def prepare(device: torch.device, block_bytes: int) -> Staging:
    """The staging memory for experts of this size: taken now if nobody has, kept for ever."""
    key = (torch.cuda.current_device() if device.index is None else device.index, block_bytes)
    if key not in _staging:
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
        self.batches = batches(host, launch.PREFILL_BATCH)
        self.batch_of = {e: b for b, batch in enumerate(self.batches) for e in batch}
        self.copied_bytes = sum(self.sizes) * len(host)
        self.work = torch.cuda.current_stream(device)
        self.staging = prepare(device, sum(self.sizes)) if host else None
        if self.staging is not None:
            # What an earlier call still reads from the buffers, this stream has ordered before.
            self.staging.stream.wait_stream(self.work)
        for batch in range(min(2, len(self.batches))):
            self._copy(batch)

    def of(self, expert: int) -> list[int]:
        """Where the expert's trellises are while it is multiplied."""
        base = self._target(expert)
        if base is None:
            return list(self.rows[expert])
        return [base, base + self.sizes[0], base + self.sizes[0] + self.sizes[1]]

    def wait_for(self, batch: int) -> None:
        """Work enqueued from now on finds the batch copied."""
        assert self.staging is not None
        self.work.wait_event(self.staging.filled[batch % 2])

    def release(self, batch: int) -> None:
        """All that reads this batch is enqueued: its buffer takes the batch after the next."""
        assert self.staging is not None
        self.staging.read[batch % 2].record(self.work)
        if batch + 2 < len(self.batches):
            self._copy(batch + 2)

    def keep(self) -> None:
        """Experts that were read where they are, to where they are to be kept as well."""
        for expert in self.kept.keys() - self.batch_of.keys():
            self._copy_expert(expert, self.kept[expert], self.work.cuda_stream)

    def _target(self, expert: int) -> int | None:
        """Where a host expert is copied: to where it is to be kept, else to its batch's buffer."""
        batch = self.batch_of.get(expert)
        if batch is None:
            return None
        assert self.staging is not None
        block = self.batches[batch].index(expert) * self.staging.block_bytes
        return self.kept.get(expert, self.staging.buffers[batch % 2].data_ptr() + block)

    def _copy(self, batch: int) -> None:
        assert self.staging is not None
        s, side = self.staging, batch % 2
        if batch >= 2:
            s.stream.wait_event(s.read[side])
        for expert in self.batches[batch]:
            to = self._target(expert)
            assert to is not None
            self._copy_expert(expert, to, s.stream.cuda_stream)
        s.filled[side].record(s.stream)

    def _copy_expert(self, expert: int, to: int, stream: int) -> None:
        gate, up, down = self.rows[expert]
        a, b, c = self.sizes
        pieces = [(gate, a), (up, b), (down, c)]
        if (up, down) == (gate + a, gate + a + b):
            pieces = [(gate, a + b + c)]  # behind each other
        for source, size in pieces:
            code = self.lib.experts_copy(to, source, size, stream)
            cuda.check(self.lib, code, f"copy of {size:,} bytes of expert {expert}")
            to += size
