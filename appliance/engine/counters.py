"""What the router chose and what crossed from the host: per layer and expert."""

from __future__ import annotations

import torch

from appliance.engine.addresses import AddressBook
from expert_kernels.cuda import DeviceCounters


class Counters:
    """Picks per (layer, expert) of this rank's experts, and bytes read from host memory.

    A step reads each host expert that any of its rows chose once: distinct experts, not picks. On
    a CPU the engine records what it sees; on a GPU the kernels count, and nothing waits for them
    until somebody asks. Rows that only fill up a captured batch are counted there like any other.
    """

    def __init__(self, book: AddressBook) -> None:
        device = book.numbers.device
        self._book = book
        self._place = {layer: i for i, layer in enumerate(book.rows)}
        # In the book's flat order; graphs hold the addresses. One tensor, so that one copy takes
        # both to the host: picks, and where an expert is to be stored when it is read next (0:
        # nowhere; negative: it has been). See `fill` of ops.experts.
        count = len(book.experts)
        self.flat_and_fill = torch.zeros(2 * count, dtype=torch.int64, device=device)
        self.flat, self.fill = self.flat_and_fill.split(count)
        self._reads = torch.zeros((len(book.rows), 2), dtype=torch.int64, device=device)

    def record(self, layer: int, rows: torch.Tensor, host_bytes: torch.Tensor) -> None:
        """`rows`: rows of the layer's table that were chosen; `host_bytes`: int64 [experts], what
        reading an expert moves over the link now, 0 for those in device memory."""
        counts = torch.bincount(rows.flatten().long(), minlength=host_bytes.numel())
        self._of(layer).add_(counts)
        self._reads[self._place[layer], 0] += host_bytes[counts > 0].sum()

    def on_device(self, layer: int) -> DeviceCounters:
        """Counters for the kernels of one layer, in the order of its table."""
        return DeviceCounters(picks=self._of(layer), reads=self._reads[self._place[layer]])

    def fill_of(self, layer: int) -> torch.Tensor:
        """`fill` of ops.experts for one layer."""
        return self._part(self.fill, layer)

    def _of(self, layer: int) -> torch.Tensor:
        return self._part(self.flat, layer)

    def _part(self, flat: torch.Tensor, layer: int) -> torch.Tensor:
        start = self._book.first[layer]
        return flat[start : start + len(self._book.rows[layer])]

    @property
    def picks(self) -> dict[int, dict[int, int]]:
        """layer -> {expert of this rank: picks}. Waits for the device where one counts."""
        out: dict[int, dict[int, int]] = {layer: {} for layer in self._book.rows}
        for (layer, expert), count in zip(self._book.experts, self.flat.tolist(), strict=True):
            out[layer][expert] = count
        return out

    @property
    def host_bytes(self) -> dict[int, int]:
        """layer -> bytes of experts read from host memory."""
        return dict(zip(self._book.rows, self._reads[:, 0].tolist(), strict=True))

    @property
    def picks_not_here(self) -> int:
        """Picks of an expert without an address; their rows became NaN. 0 unless there is a bug."""
        return int(self._reads[:, 1].sum())

    def reset(self) -> None:
        """Back to zero: warm-up rows choose a few experts thousands of times."""
        self.flat.zero_()
        self._reads.zero_()
