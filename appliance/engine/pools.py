"""The memory of one home: bytes of the device, or host memory that the device may read."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from appliance.engine.hostmem import HostMapping, Node
from appliance.engine.pinning import Pinned, chunks
from appliance.engine.stored import FileMapping, chunks_of
from appliance.plan.model import Home


class Pool:
    """Memory of one home: `size_bytes` exactly, at `address`, as bytes in `memory`."""

    def __init__(
        self,
        home: Home,
        size_bytes: int,
        device: torch.device,
        node: Node | None,
        starts: Sequence[int] = (),
        file: FileMapping | None = None,
    ) -> None:
        """`starts`: offsets of the blocks, ascending; a registration ends at one of them.

        With `file` its bytes are the home: `span_bytes` with the gaps between them, and nobody
        writes them.
        """
        self.home = home
        self.size_bytes = self.span_bytes = size_bytes
        self.mapping: HostMapping | FileMapping | None = None
        self.pinned: Pinned | None = None
        self.is_read_only = file is not None
        if file is not None:
            self.mapping, self.span_bytes = file, file.size_bytes
            self.memory = torch.frombuffer(file.view(0, file.size_bytes), dtype=torch.uint8)
        elif size_bytes == 0:
            self.memory = torch.empty(0, dtype=torch.uint8)
        elif home == "device" and device.type != "cpu":
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        else:
            # Without a GPU both homes are RAM; separate mappings keep them apart for real.
            self.mapping = HostMapping(size_bytes, node=node)
            view = self.mapping.view(0, size_bytes)
            self.memory = torch.frombuffer(view, dtype=torch.uint8)
        if self.mapping is not None and device.type != "cpu":
            try:
                self._pin(starts)
            except BaseException:
                self.mapping.close()
                raise
        self.address = self.memory.data_ptr() if size_bytes else 0

    def _pin(self, starts: Sequence[int]) -> None:
        mapping = self.mapping
        assert mapping is not None
        if isinstance(mapping, FileMapping):
            pieces = [p for run in mapping.pieces for p in chunks_of(run, starts)]
        else:
            pieces = chunks(starts, self.size_bytes)
        self.pinned = Pinned(mapping.address, pieces, read_only=self.is_read_only)

    def close(self) -> None:
        """Unregister and unmap host memory. Nobody may read it any more."""
        if self.pinned is not None:
            self.pinned.close()
        if self.mapping is not None:
            self.mapping.close()

    def contains(self, address: int, size_bytes: int) -> bool:
        return self.address <= address and address + size_bytes <= self.address + self.span_bytes


class DeviceMemoryError(RuntimeError):
    """The device has not what the plan gives it. The message has the way out."""


def shortage(needed: int, free: int, slots: Sequence[int]) -> str:
    """What is said where `needed` bytes do not fit into `free`. `slots`: where each begins, in
    bytes from the first resident."""
    ends = [*slots[1:], needed]
    where = (
        f"slot {sum(end <= free for end in ends) + 1:,} of {len(slots):,} would not fit"
        if slots and free >= slots[0]
        else "the residents alone would not fit"
    )
    return (
        f"experts need {needed:,} bytes of device memory and {free:,} are free: {where}. Try: stop "
        "what else uses the GPU (nvidia-smi), or plan again with --device-memory or --cache-slots"
    )


def device_pool(size_bytes: int, slots: Sequence[int], device: torch.device) -> Pool:
    try:
        return Pool("device", size_bytes, device, None)
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise DeviceMemoryError(shortage(size_bytes, free, slots)) from error
