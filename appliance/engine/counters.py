"""What the router chose and what crossed from the host: per layer and expert, on the CPU engine."""

from __future__ import annotations

import torch


class Counters:
    """Picks per (layer, expert) of this rank's experts, and bytes read from host homes.

    A step reads each host expert that any of its rows chose once: distinct experts, not picks.
    """

    def __init__(self) -> None:
        self.picks: dict[int, torch.Tensor] = {}  # layer -> int64 [experts]
        self.host_bytes_read = 0

    def record(self, layer: int, ids: torch.Tensor, host_block_bytes: torch.Tensor) -> None:
        """`ids`: global expert numbers that rows chose here; `host_block_bytes`: int64 [experts],
        the bytes that reading an expert moves over the link, 0 for device homes."""
        counts = torch.bincount(ids.flatten().long(), minlength=host_block_bytes.numel())
        total = self.picks.setdefault(layer, torch.zeros_like(host_block_bytes))
        total += counts
        self.host_bytes_read += int(host_block_bytes[counts > 0].sum())

    def reset(self) -> None:
        """Back to zero: warm-up rows choose a few experts thousands of times."""
        self.picks.clear()
        self.host_bytes_read = 0
