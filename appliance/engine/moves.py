"""How numbers move between steps: at once on a CPU, in stream order on a GPU.

Everything here is enqueued between two steps on the stream that runs them. Nothing waits for the
device but `Snapshot.read`, which is asked for a step that has long ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

RING = 8  # more than the steps that are in flight at once


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts as they were when a step had ended. `read` waits until they have arrived."""

    read: Callable[[], torch.Tensor]


class Moves(Protocol):
    """What the cache needs of a device."""

    def snapshot(self, counts: torch.Tensor) -> Snapshot: ...
    def point(self, numbers: torch.Tensor, changes: Mapping[int, int]) -> None: ...


class CpuMoves:
    """No step is running when these are called."""

    def snapshot(self, counts: torch.Tensor) -> Snapshot:
        kept = counts.clone()
        return Snapshot(lambda: kept)

    def point(self, numbers: torch.Tensor, changes: Mapping[int, int]) -> None:
        numbers[list(changes)] = torch.tensor(list(changes.values()), device="cpu")


class CudaMoves:
    """Through pinned buffers, each used again only when what was read from it has been read."""

    def __init__(self, device: torch.device, counts: int, most_changes: int) -> None:
        """`counts`: numbers in a snapshot; `most_changes`: of one call of `point`."""
        self._device = device
        self._counts = [_pinned((counts,)) for _ in range(RING)]
        self._changes = [_pinned((2 * most_changes,)) for _ in range(RING)]
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
        # What changed and no more: the rest of the buffer stays where it is.
        staged, count = self._changes[turn][: 2 * len(changes)], len(changes)
        staged.copy_(torch.tensor([*changes, *changes.values()], device="cpu"))
        there = staged.to(self._device, non_blocking=True)
        self._free[turn].record()
        numbers.index_copy_(0, there[:count], there[count:])


def _pinned(shape: tuple[int, ...]) -> torch.Tensor:
    # The device is named: vLLM makes the GPU the default one while a model is built.
    return torch.zeros(shape, dtype=torch.int64, device="cpu").pin_memory()
