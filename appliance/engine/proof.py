"""Proof before ready, on this rank: the live tables and homes are what the plan and shards say.

Four questions, each answered from the live engine, never from what loading believed:
bytes per home equal the plan's ledger; every address lies inside its home, or its layer's scales;
sampled experts of every layer and home, read again from the shards, are bit for bit what the
kernels will read, scales too, and the op over the live table agrees with the reference over the
shards' bytes; sampled rows of our lookup tables are the shards'; pinned pages lie on the plan's
node. An expert in a cache slot has two copies, and both are read.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from appliance.checkpoint.model import Checkpoint, Tensor
from appliance.checkpoint.safetensors import read_bytes
from appliance.engine.arena import HOMES, Arena
from appliance.engine.places import PLACES, SCALES, place_of, stray_scales, stray_trellises
from appliance.engine.rank import LiveLayer, RankState
from appliance.engine.resident import pages_by_node
from appliance.plan.model import EXPERTS_IN
from expert_kernels import codec, ops, reference

SAMPLES = 2  # experts a layer and home, besides the first and the last
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_DTYPES = {"I16": torch.int16, "F16": torch.float16}
Stored = list[dict[str, torch.Tensor]]  # of gate, up, down: trellis, suh, svh


def prove(state: RankState, checkpoint: Checkpoint, seed: int = 0) -> dict[str, Any]:
    """{"rank", "ok", "problems": [sentences], "homes": {home: {"experts", "bytes"}}, "samples"}."""
    arena = state.arena
    strays = [*stray_trellises(state), *stray_scales(state)]
    problems = [*_wrong_bytes(arena), *(words for _, _, words in strays), *_wrong_nodes(arena)]
    problems += _missing_layers(state)
    lost = {(layer, expert) for layer, expert, _ in strays}  # not to be read by kernels
    samples = list(_samples(state, random.Random(seed)))
    for live, expert in samples:
        stored = [_stored(arena, checkpoint, live, expert, p) for p in range(3)]
        problems += _wrong_trellises(arena, live, expert, stored)
        if (live.shape.index, expert) not in lost:
            problems += _differences(arena, live, expert, stored)
    for table in state.tables:
        problems += table.differences(checkpoint, seed)
    return {
        "rank": arena.plan.rank,
        "ok": not problems,
        "problems": problems,
        "homes": homes(arena),
        "samples": len(samples),
    }


def homes(arena: Arena) -> dict[str, dict[str, int]]:
    """Experts and bytes in each home of this rank."""
    return {
        home: {
            "experts": sum(block.home == home for block in arena.blocks.values()),
            "bytes": arena.bytes_in(home),
        }
        for home in HOMES
    } | {"slot": {"experts": len(arena.held), "bytes": arena.slot_bytes}}


def _wrong_bytes(arena: Arena) -> Iterator[str]:
    for home in HOMES:
        planned = sum(
            line.size_bytes for line in arena.plan.ledger if line.part in EXPERTS_IN[home]
        )
        held = arena.pools[home].size_bytes
        used = arena.bytes_in(home) + (arena.slot_bytes if home == "device" else 0)
        if not planned == held == used:
            yield (
                f"rank {arena.plan.rank}: the plan has {planned:,} bytes of experts in the home "
                f"{home}, the pool holds {held:,}, its blocks {used:,}"
            )


def _missing_layers(state: RankState) -> Iterator[str]:
    for placement in state.arena.plan.layers:
        if placement.layer not in state.live:
            yield f"layer {placement.layer} is in the plan but not in the engine"


def _wrong_nodes(arena: Arena) -> Iterator[str]:
    mapping = arena.pools["host"].mapping
    if mapping is None or mapping.node is None:
        return
    pages = pages_by_node(mapping.address, mapping.mapped_bytes)
    wrong = sum(count for node, count in pages.items() if node != mapping.node.index)
    if wrong or not pages:
        yield (
            f"rank {arena.plan.rank}: {wrong:,} of {sum(pages.values()):,} pages of the host arena "
            f"are not on NUMA node {mapping.node.index}"
        )


def _samples(state: RankState, rng: random.Random) -> Iterator[tuple[LiveLayer, int]]:
    for index, live in sorted(state.live.items()):
        for place in PLACES:
            here = [e for e in live.experts if place_of(state.arena, index, e) == place]
            ends = {here[0], here[-1]} if here else set()
            for expert in sorted(ends | set(rng.sample(here, min(SAMPLES, len(here))))):
                yield live, expert


def _wrong_trellises(arena: Arena, live: LiveLayer, expert: int, stored: Stored) -> Iterator[str]:
    """The live bytes of an expert's home, and of its slot, against the shards'."""
    index = live.shape.index
    for projection, parts in enumerate(stored):
        right = bytes(parts["trellis"].contiguous().view(-1).view(torch.uint8).numpy())
        for block in arena.copies(index, expert):
            if arena.read(index, expert, projection, block) != right:
                word = live.shape.projection_names[projection]
                yield (
                    f"{_words(arena, live, expert)}: the live bytes of {word} are not those of "
                    "the shard"
                )


def _differences(arena: Arena, live: LiveLayer, expert: int, stored: Stored) -> Iterator[str]:
    """What the kernels read by the live table, and what they make of it."""
    where = _words(arena, live, expert)
    row = live.table.addresses[live.experts.index(expert)].tolist()
    for projection, parts in enumerate(stored):
        for part, kind in enumerate(SCALES, 1):
            at = (row[projection][part] - live.scales.data_ptr()) // 2
            found = live.scales[at : at + len(parts[kind])].cpu()
            if not found.view(torch.int16).equal(parts[kind].view(torch.int16)):
                word = live.shape.projection_names[projection]
                yield f"{where}: the live {kind} of {word} is not that of the shard"
    dtype = torch.float32 if live.table.addresses.device.type == "cpu" else torch.float16
    difference = _relative_difference(live, expert, stored, dtype)
    if not difference <= TOLERANCE[dtype]:
        yield (
            f"{where}: the live table's output differs from the reference over the shard by "
            f"{difference:.1e} of its size (at most {TOLERANCE[dtype]:.0e})"
        )


def _words(arena: Arena, live: LiveLayer, expert: int) -> str:
    place = place_of(arena, live.shape.index, expert)
    return f"layer {live.shape.index} expert {expert} ({place})"


def _stored(
    arena: Arena, checkpoint: Checkpoint, live: LiveLayer, expert: int, projection: int
) -> dict[str, torch.Tensor]:
    """This rank's share of one projection, from the shards, by a way that loading did not take."""
    key = f"{live.shape.prefix}.{expert}.{live.shape.projection_names[projection]}"
    parts: dict[str, torch.Tensor] = {}
    for kind in ("trellis", "suh", "svh"):
        tensor = _tensor(checkpoint, key, kind)
        if kind == "trellis":
            parts[kind] = arena.shard.trellis(projection, tensor)
        else:
            parts[kind] = arena.shard.scale(projection, kind, tensor)
    return parts


def _tensor(checkpoint: Checkpoint, key: str, kind: str) -> torch.Tensor:
    found = checkpoint.tensors.get(f"{key}.{kind}")
    if found is None:  # older files: packed sign words su, sv
        packed = _open(checkpoint, checkpoint.tensors[f"{key}.{kind.removesuffix('h')}"])
        return codec.unpack_signs(packed)
    return _open(checkpoint, found)


def _open(checkpoint: Checkpoint, tensor: Tensor) -> torch.Tensor:
    raw = bytearray(read_bytes(checkpoint.path, tensor))
    return torch.frombuffer(raw, dtype=_DTYPES[tensor.dtype]).reshape(tensor.shape)


def _relative_difference(live: LiveLayer, expert: int, stored: Stored, dtype: torch.dtype) -> float:
    """One row through this expert alone: live table and op against reference and shard bytes."""
    device = live.table.addresses.device
    generator = torch.Generator().manual_seed(expert)
    x = torch.randn(1, live.table.hidden_size, generator=generator).to(dtype)
    row = torch.tensor([[live.experts.index(expert)]])
    one = torch.ones(1, 1, dtype=torch.float32)
    limit = live.swiglu_limit
    y = ops.experts(
        x.to(device), one.to(device), row.to(device), live.table, swiglu_limit=limit
    ).cpu()
    books = [p.codebook for p in live.shape.experts[expert].projections]
    # In float64 by plain torch, where the engine computes: a CPU takes seconds for a large expert.
    wide = x.to(device).double()
    stored = [{kind: t.to(device) for kind, t in parts.items()} for parts in stored]
    gate, up = (
        reference.linear(wide, p["trellis"], p["suh"], p["svh"], book)
        for p, book in zip(stored[:2], books, strict=False)
    )
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    inner = torch.nn.functional.silu(gate) * up
    down = stored[2]
    expected = reference.linear(inner, down["trellis"], down["suh"], down["svh"], books[2]).cpu()
    return float((y.double() - expected).norm() / expected.norm().clamp(min=1e-30))
