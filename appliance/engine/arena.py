"""Where this rank's experts are: one device pool and one host arena, filled while shards stream by.

An expert is one block [gate | up | down] of trellises in one home, 4 KiB-aligned, the same layout
in both, so moving one is a copy of bytes and a change of three addresses. No stacked [E, ...]
tensor of weights ever exists. Sizes are known from headers and plan before the first byte is read.

Behind its residents the device pool has the spare slots of all layers. A slot holds a second copy
of an expert whose home is the host; while it does, the kernels read that copy.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from appliance.checkpoint.model import Checkpoint, ExpertShape, MoeLayer
from appliance.engine.hostmem import Node
from appliance.engine.pools import Pool, device_pool
from appliance.engine.stored import FileMapping, runs
from appliance.plan.model import (
    BLOCK_ALIGNMENT_BYTES,
    Home,
    LayerPlacement,
    Plan,
    expert_block_bytes,
    parse_ids,
)
from appliance.weights.arena_file import ArenaFile

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


class Arena:
    """This rank's pools, and the block of each of its experts, as the plan says.

    Raises ValueError when the plan does not name every local expert of every layer exactly once.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        checkpoint: Checkpoint,
        device: torch.device,
        learned: Mapping[int, Sequence[float]] | None = None,
        stored: ArenaFile | None = None,
    ) -> None:
        """`learned`: recent picks by layer and expert; those layers' slots start with the most
        picked of their host experts, the others with what the plan names. `stored`: host experts
        stay in this file of this rank, mapped."""
        self.plan = plan.ranks[rank]
        self.layers = {layer.index: layer for layer in checkpoint.target_layers}
        parts = 1 if plan.expert_parallel else plan.tensor_parallel
        self.shard = Shard(0 if plan.expert_parallel else rank, parts)
        offsets, sizes, slots = self._layout(parts)
        node = None if self.plan.numa_node is None else Node(self.plan.numa_node, self._cpus())
        file = None
        if stored is not None and sizes["host"]:
            offsets = {
                key: (home, stored.block(*key)[0] if home == "host" else offset, size)
                for key, (home, offset, size) in offsets.items()
            }
            away = [(offset, size) for home, offset, size in offsets.values() if home == "host"]
            file = FileMapping(stored.path, runs(away), node)
        starts = sorted(offset for home, offset, _ in offsets.values() if home == "host")
        begin = [at for places in slots.values() for at in places]
        in_device = device_pool(sizes["device"], begin, device)
        try:
            in_host = Pool("host", sizes["host"], device, node, starts, file)
        except BaseException:
            in_device.close()
            raise
        self.pools = {"device": in_device, "host": in_host}
        self.blocks = {
            key: Block(home, self.pools[home].address + offset, size)
            for key, (home, offset, size) in offsets.items()
        }
        base = self.pools["device"].address
        # By layer the addresses of its slots, and of which expert each slot now has a copy.
        self.slots = {layer: [base + at for at in places] for layer, places in slots.items()}
        self.held: dict[tuple[int, int], int] = {
            (place.layer, expert): address
            for place in self.plan.layers
            for expert, address in zip(
                _first_in_slots(place, (learned or {}).get(place.layer)),
                self.slots[place.layer],
                strict=False,
            )
        }

    def _cpus(self) -> frozenset[int]:
        return parse_ids(self.plan.cpus) if self.plan.cpus else frozenset()

    def _layout(
        self, parts: int
    ) -> tuple[dict[tuple[int, int], tuple[Home, int, int]], dict[str, int], dict[int, list[int]]]:
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
        slots: dict[int, list[int]] = {}
        for placement in self.plan.layers:
            size = expert_block_bytes(self.layers[placement.layer].experts[0], parts)
            slots[placement.layer] = [
                sizes["device"] + i * size for i in range(placement.cache_slots)
            ]
            sizes["device"] += placement.cache_slots * size
        return offsets, sizes, slots

    def layer(self, index: int) -> MoeLayer:
        return self.layers[index]

    def address(self, layer: int, expert: int) -> int:
        """Where the kernels are to read an expert: its slot if it has one, else its home."""
        slot = self.held.get((layer, expert))
        return self.blocks[layer, expert].address if slot is None else slot

    def trellis_addresses(self, layer: int, expert: int, at: int | None = None) -> tuple[int, ...]:
        """Absolute addresses of gate, up and down: where they are read now, or in a block `at`."""
        shape = self.layers[layer].experts[expert]
        start = self.address(layer, expert) if at is None else at
        return tuple(start + self._inner_offset(shape, p) for p in range(3))

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
        for block in self.copies(layer, expert):
            address = self.trellis_addresses(layer, expert, block)[projection]
            pool = self.pool_at(address, size)
            if pool.is_read_only:
                continue  # it is there; the proof holds samples of it against the shards
            start = address - pool.address
            pool.memory[start : start + size].copy_(source)

    def copies(self, layer: int, expert: int) -> tuple[int, ...]:
        """Addresses of the blocks that hold an expert: its home, and its slot if it has one."""
        home, read = self.blocks[layer, expert].address, self.address(layer, expert)
        return (home,) if home == read else (home, read)

    def read(self, layer: int, expert: int, projection: int, at: int | None = None) -> bytes:
        """The live bytes of one trellis, from the very address that the kernels read, or of the
        copy in the block `at`."""
        address = self.trellis_addresses(layer, expert, at)[projection]
        size = self.trellis_bytes(layer, expert, projection)
        pool = self.pool_at(address, size)
        if pool.mapping is not None:
            return ctypes.string_at(address, size)
        start = address - pool.address
        return bytes(pool.memory[start : start + size].cpu().numpy())

    def pool_at(self, address: int, size_bytes: int) -> Pool:
        """The pool of these bytes. Raises ValueError when they are in none."""
        for pool in self.pools.values():
            if pool.contains(address, size_bytes):
                return pool
        raise ValueError(f"{size_bytes:,} bytes at {address:#x} are in no home of this rank")

    def bytes_in(self, home: Home) -> int:
        """Of the experts whose home it is, without slots."""
        return sum(block.size_bytes for block in self.blocks.values() if block.home == home)

    @property
    def slot_bytes(self) -> int:
        return sum(len(places) * self.block_bytes(layer) for layer, places in self.slots.items())

    def block_bytes(self, layer: int) -> int:
        """Of one slot of a layer: its experts are of one size."""
        return expert_block_bytes(self.layers[layer].experts[0], self.shard.parts)


def _first_in_slots(place: LayerPlacement, picks: Sequence[float] | None) -> list[int]:
    if picks is None:
        return sorted(place.slot_experts)
    hottest = sorted(place.host_experts, key=lambda expert: (-picks[expert], expert))
    return sorted(hottest[: place.cache_slots])


assert BLOCK_ALIGNMENT_BYTES % 128 == 0
