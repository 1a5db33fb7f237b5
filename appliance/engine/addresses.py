"""Where every expert of this rank is now: one flat table on the device, a view of it a layer.

The kernels read it at every call; CUDA graphs hold its address, so its storage never changes. Only
its numbers do, between steps and in stream order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

NUMBERS = 9  # of one expert: [gate | up | down] x [trellis | suh | svh]


class AddressBook:
    """`rows`: by layer, the global numbers of this rank's experts, in the order of its table."""

    def __init__(self, rows: Mapping[int, Sequence[int]], device: torch.device) -> None:
        self.rows = rows
        self.first: dict[int, int] = {}  # layer -> its first expert in the flat order
        self.experts: list[tuple[int, int]] = []  # flat order -> (layer, expert)
        for layer, experts in rows.items():
            self.first[layer] = len(self.experts)
            self.experts += [(layer, expert) for expert in experts]
        self.place = {key: i for i, key in enumerate(self.experts)}
        self.numbers = torch.zeros(len(self.experts) * NUMBERS, dtype=torch.int64, device=device)

    def table(self, layer: int) -> torch.Tensor:
        """int64 [experts, 3, 3], a view: what ops.ExpertTable takes."""
        count = len(self.rows[layer])
        start = self.first[layer] * NUMBERS
        return self.numbers[start : start + count * NUMBERS].view(count, 3, 3)

    def trellises(self, layer: int, expert: int) -> tuple[int, int, int]:
        """Places in `numbers` of an expert's three trellis addresses."""
        start = self.place[layer, expert] * NUMBERS
        return start, start + 3, start + 6
