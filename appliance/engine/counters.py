"""What the router chose and what crossed from the host: per layer and expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from expert_kernels.cuda import DeviceCounters


class Counters:
    """Picks per (layer, expert) of this rank's experts, and bytes read from host homes.

    A step reads each host expert that any of its rows chose once: distinct experts, not picks. On
    a CPU the engine records what it sees; on a GPU the kernels count, and nothing waits for them
    until somebody asks. Rows that only fill up a captured batch are counted there like any other.
    """

    def __init__(self) -> None:
        self._recorded: dict[int, torch.Tensor] = {}  # layer -> int64 [experts]
        self._bytes = 0
        self._on_device: dict[int, tuple[DeviceCounters, torch.Tensor, int]] = {}

    def record(self, layer: int, ids: torch.Tensor, host_block_bytes: torch.Tensor) -> None:
        """`ids`: global expert numbers that rows chose here; `host_block_bytes`: int64 [experts],
        the bytes that reading an expert moves over the link, 0 for device homes."""
        counts = torch.bincount(ids.flatten().long(), minlength=host_block_bytes.numel())
        total = self._recorded.setdefault(layer, torch.zeros_like(host_block_bytes))
        total += counts
        self._bytes += int(host_block_bytes[counts > 0].sum())

    def on_device(
        self, layer: int, rows: Sequence[int], experts: int, device: torch.device
    ) -> DeviceCounters:
        """Counters for the kernels of one layer: `rows` are the global numbers of its table's rows,
        of `experts` in all. Their storage stays: graphs hold its address."""
        counted = DeviceCounters(
            picks=torch.zeros(len(rows), dtype=torch.int64, device=device),
            reads=torch.zeros(2, dtype=torch.int64, device=device),
        )
        self._on_device[layer] = (counted, torch.tensor(rows), experts)
        return counted

    @property
    def picks(self) -> dict[int, torch.Tensor]:
        """layer -> int64 [experts], on the CPU. Waits for the device where one counts."""
        out = dict(self._recorded)
        for layer, (counted, rows, experts) in self._on_device.items():
            out[layer] = torch.zeros(experts, dtype=torch.int64)
            out[layer][rows] = counted.picks.cpu()
        return out

    @property
    def host_bytes_read(self) -> int:
        return self._bytes + sum(int(c.reads[0]) for c, _, _ in self._on_device.values())

    @property
    def picks_not_here(self) -> int:
        """Picks of an expert without an address; their rows became NaN. 0 unless there is a bug."""
        return sum(int(c.reads[1]) for c, _, _ in self._on_device.values())

    def reset(self) -> None:
        """Back to zero: warm-up rows choose a few experts thousands of times."""
        self._recorded.clear()
        self._bytes = 0
        for counted, _, _ in self._on_device.values():
            counted.picks.zero_()
            counted.reads.zero_()
