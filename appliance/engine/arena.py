"""Where this rank's experts are: one device pool and one host arena, filled while shards stream by.

An expert is one block [gate | up | down] of trellises in one home, 4 KiB-aligned, the same layout
in both, so moving one is a copy of bytes and a change of three addresses. No stacked [E, ...]
tensor of weights ever exists. Sizes are known from headers and plan before the first byte is read.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from appliance.checkpoint.model import Checkpoint, ExpertShape, MoeLayer
from appliance.engine.hostmem import HostMapping, Node
from appliance.engine.pinning import Pinned, chunks
from appliance.plan.model import BLOCK_ALIGNMENT_BYTES, Home, Plan, expert_block_bytes, parse_ids

HOMES: tuple[Home, Home] = ("device", "host")


@dataclass(frozen=True, slots=True)
class Block:
    """One expert's bytes: `address` is absolute, as the kernels read it."""

    home: Home
    address: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of every expert that one rank holds: all of it, or rank `rank` of `parts`."""

    rank: int
    parts: int

    def trellis(self, projection: int, tensor: torch.Tensor) -> torch.Tensor:
        """[k/16, n/16, 16K] -> this rank's tiles: gate and up are split along n, down along k."""
        axis = 0 if projection == 2 else 1
        size = tensor.shape[axis] // self.parts
        return tensor.narrow(axis, self.rank * size, size)

    def scale(self, projection: int, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """suh [k] or svh [n] -> this rank's: only the split side is cut."""
        split = kind == ("suh" if projection == 2 else "svh")
        if not split:
            return tensor
        size = tensor.shape[0] // self.parts
        return tensor.narrow(0, self.rank * size, size)


class Pool:
    """Memory of one home: `size_bytes` exactly, at `address`, as bytes in `memory`."""

    def __init__(
        self,
        home: Home,
        size_bytes: int,
        device: torch.device,
        node: Node | None,
        starts: Sequence[int] = (),
    ) -> None:
        """`starts`: offsets of the blocks, ascending; a registration ends at one of them."""
        self.home = home
        self.size_bytes = size_bytes
        self.mapping: HostMapping | None = None
        self.pinned: Pinned | None = None
        if size_bytes == 0:
            self.memory = torch.empty(0, dtype=torch.uint8)
        elif home == "device" and device.type != "cpu":
            self.memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        else:
            # Without a GPU both homes are RAM; separate mappings keep them apart for real.
            self.mapping = HostMapping(size_bytes, node=node)
            view = self.mapping.view(0, size_bytes)
            self.memory = torch.frombuffer(view, dtype=torch.uint8)
            if device.type != "cpu":
                self.pinned = Pinned(self.mapping.address, chunks(starts, size_bytes))
        self.address = self.memory.data_ptr() if size_bytes else 0

    def close(self) -> None:
        """Unregister and unmap host memory. Nobody may read it any more."""
        if self.pinned is not None:
            self.pinned.close()
        if self.mapping is not None:
            self.mapping.close()

    def contains(self, address: int, size_bytes: int) -> bool:
        return self.address <= address and address + size_bytes <= self.address + self.size_bytes


class Arena:
    """This rank's pools, and the block of each of its experts, as the plan says.

    Raises ValueError when the plan does not name every local expert of every layer exactly once.
    """

    def __init__(self, plan: Plan, rank: int, checkpoint: Checkpoint, device: torch.device) -> None:
        self.plan = plan.ranks[rank]
        self.layers = {layer.index: layer for layer in checkpoint.target_layers}
        parts = 1 if plan.expert_parallel else plan.tensor_parallel
        self.shard = Shard(0 if plan.expert_parallel else rank, parts)
        offsets, sizes = self._layout(parts)
        node = None if self.plan.numa_node is None else Node(self.plan.numa_node, self._cpus())
        starts = [offset for home, offset, _ in offsets.values() if home == "host"]
        self.pools = {
            "device": Pool("device", sizes["device"], device, None),
            "host": Pool("host", sizes["host"], device, node, starts),
        }
        self.blocks = {
            key: Block(home, self.pools[home].address + offset, size)
            for key, (home, offset, size) in offsets.items()
        }

    def _cpus(self) -> frozenset[int]:
        return parse_ids(self.plan.cpus) if self.plan.cpus else frozenset()

    def _layout(
        self, parts: int
    ) -> tuple[dict[tuple[int, int], tuple[Home, int, int]], dict[str, int]]:
        offsets: dict[tuple[int, int], tuple[Home, int, int]] = {}
        sizes: dict[str, int] = {"device": 0, "host": 0}
        for placement in self.plan.layers:
            layer = self.layers.get(placement.layer)
            if layer is None:
                raise ValueError(f"the plan places layer {placement.layer}, which has no experts")
            homes: tuple[tuple[Home, frozenset[int]], ...] = (
                ("device", placement.device_experts),
                ("host", placement.host_experts),
            )
            for home, expert in ((h, e) for h, ids in homes for e in sorted(ids)):
                if expert >= len(layer.experts) or (layer.index, expert) in offsets:
                    raise ValueError(
                        f"the plan gives layer {layer.index} expert {expert} no home or two"
                    )
                size = expert_block_bytes(layer.experts[expert], parts)
                offsets[layer.index, expert] = (home, sizes[home], size)
                sizes[home] += size
        return offsets, sizes

    def layer(self, index: int) -> MoeLayer:
        return self.layers[index]

    def trellis_address(self, layer: int, expert: int, projection: int) -> int:
        """Absolute address of one trellis: 0, 1, 2 are gate, up, down."""
        shape = self.layers[layer].experts[expert]
        return self.blocks[layer, expert].address + self._inner_offset(shape, projection)

    def trellis_bytes(self, layer: int, expert: int, projection: int) -> int:
        shape = self.layers[layer].experts[expert]
        return shape.projections[projection].trellis_bytes // self.shard.parts

    def _inner_offset(self, shape: ExpertShape, projection: int) -> int:
        sizes = [p.trellis_bytes // self.shard.parts for p in shape.projections]
        return next(itertools.islice(itertools.accumulate(sizes, initial=0), projection, None))

    def write(self, layer: int, expert: int, projection: int, trellis: torch.Tensor) -> None:
        """Copy one stored trellis [k/16, n/16, 16K], whole, to its home: this rank's share."""
        share = self.shard.trellis(projection, trellis).contiguous()
        size = self.trellis_bytes(layer, expert, projection)
        source = share.view(-1).view(torch.uint8)
        if source.numel() != size:
            raise ValueError(
                f"layer {layer} expert {expert}: a trellis of {source.numel()} bytes came for a "
                f"place of {size}"
            )
        pool = self.pools[self.blocks[layer, expert].home]
        start = self.trellis_address(layer, expert, projection) - pool.address
        pool.memory[start : start + size].copy_(source)

    def read(self, layer: int, expert: int, projection: int) -> bytes:
        """The live bytes of one trellis, from the very address that the kernels read."""
        pool = self.pools[self.blocks[layer, expert].home]
        address = self.trellis_address(layer, expert, projection)
        size = self.trellis_bytes(layer, expert, projection)
        if pool.mapping is not None:
            return ctypes.string_at(address, size)
        start = address - pool.address
        return bytes(pool.memory[start : start + size].cpu().numpy())

    def bytes_in(self, home: Home) -> int:
        return sum(block.size_bytes for block in self.blocks.values() if block.home == home)


assert BLOCK_ALIGNMENT_BYTES % 128 == 0
