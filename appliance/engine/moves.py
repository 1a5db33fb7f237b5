"""How bytes and addresses move between steps: at once on a CPU, in stream order on a GPU.

Everything here is enqueued between two steps on the stream that runs them, or on a side stream
that is ordered against it by events. Nothing waits for the device but `Snapshot.read`, which is
asked for a step that has long ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Copy = tuple[int, int, int]  # to, from, bytes: absolute addresses
RING = 8  # more than the steps that are in flight at once


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts as they were when a step had ended. `read` waits until they have arrived."""

    read: Callable[[], torch.Tensor]


class Moves(Protocol):
    """What the cache needs of a device."""

    def snapshot(self, counts: torch.Tensor) -> Snapshot: ...
    def point(self, numbers: torch.Tensor, changes: Mapping[int, int]) -> None: ...
    def fill(self, copies: Sequence[Copy]) -> object: ...
    def land(self, ticket: object) -> None: ...


class CpuMoves:
    """Both homes are RAM, and no step is running when these are called."""

    def snapshot(self, counts: torch.Tensor) -> Snapshot:
        kept = counts.clone()
        return Snapshot(lambda: kept)

    def point(self, numbers: torch.Tensor, changes: Mapping[int, int]) -> None:
        numbers[list(changes)] = torch.tensor(list(changes.values()), dtype=torch.int64)

    def fill(self, copies: Sequence[Copy]) -> object:
        for to, source, size in copies:
            ctypes.memmove(to, source, size)
        return None

    def land(self, ticket: object) -> None:
        pass


class CudaMoves:
    """The copy engine fills slots on a side stream; steps run on the current one."""

    def __init__(self, device: torch.device, counts: int, most_changes: int) -> None:
        from expert_kernels import cuda

        self._cuda, self._lib, self._device = cuda, cuda.library_for(device), device
        self._side = torch.cuda.Stream(device)
        self._counts = [torch.zeros(counts, dtype=torch.int64).pin_memory() for _ in range(RING)]
        self._changes = [
            torch.zeros((2, most_changes), dtype=torch.int64).pin_memory() for _ in range(RING)
        ]
        # A buffer is used again only when what was read from it has been read.
        self._free = [torch.cuda.Event() for _ in range(RING)]
        self._taken = self._written = 0

    def snapshot(self, counts: torch.Tensor) -> Snapshot:
        kept = self._counts[self._taken % RING]
        self._taken += 1
        kept.copy_(counts, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def read() -> torch.Tensor:
            arrived.synchronize()
            return kept.clone()

        return Snapshot(read)

    def point(self, numbers: torch.Tensor, changes: Mapping[int, int]) -> None:
        turn = self._written % RING
        self._written += 1
        self._free[turn].synchronize()
        staged = self._changes[turn]
        count = len(changes)
        staged[0, :count] = torch.tensor(list(changes))
        staged[1, :count] = torch.tensor(list(changes.values()))
        there = staged.to(self._device, non_blocking=True)
        self._free[turn].record()
        numbers.index_copy_(0, there[0, :count], there[1, :count])

    def fill(self, copies: Sequence[Copy]) -> object:
        """Starts when all steps enqueued so far have ended: none of them reads the slots later."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        for to, source, size in copies:
            code = self._lib.experts_copy(to, source, size, self._side.cuda_stream)
            self._cuda.check(self._lib, code, f"copy of {size:,} bytes to a cache slot")
        filled = torch.cuda.Event()
        filled.record(self._side)
        return filled

    def land(self, ticket: object) -> None:
        assert isinstance(ticket, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(ticket)
