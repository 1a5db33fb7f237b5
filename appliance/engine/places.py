"""Where the kernels read each expert, and addresses of the live tables that are nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from appliance.engine.arena import Arena
from appliance.engine.rank import LiveLayer, RankState

Place = Literal["device", "slot", "host"]
PLACES: tuple[Place, ...] = ("device", "slot", "host")
SCALES = ("suh", "svh")
Stray = tuple[int, int, str]  # layer, expert, what of it is where nothing of it should be


def place_of(arena: Arena, layer: int, expert: int) -> Place:
    """Where the kernels read an expert now: its home, or a slot."""
    return "slot" if (layer, expert) in arena.held else arena.blocks[layer, expert].home


def stray_trellises(state: RankState) -> Iterator[Stray]:
    """Every trellis address of every live table, against the home that the plan names."""
    arena = state.arena
    for index, live in sorted(state.live.items()):
        table = live.table.addresses[:, :, 0].tolist()
        for addresses, expert in zip(table, live.experts, strict=True):
            home = place_of(arena, index, expert)
            pool = arena.pools["host" if home == "host" else "device"]
            meant = arena.trellis_addresses(index, expert)
            for projection, address in enumerate(addresses):
                size, right = arena.trellis_bytes(index, expert, projection), meant[projection]
                if not pool.contains(address, size) or address != right:
                    yield (
                        index,
                        expert,
                        f"layer {index} expert {expert}: address {address:#x} is not where its "
                        f"{home} copy is ({right:#x})",
                    )


def stray_scales(state: RankState) -> Iterator[Stray]:
    """Every scale vector of every live table: inside its layer's buffer, and no two overlap."""
    for index, live in sorted(state.live.items()):
        end = live.scales.data_ptr()
        last = end + 2 * live.scales.numel()
        table = live.table.addresses[:, :, 1:].tolist()
        vectors = sorted(
            (address, 2 * _scale_size(live, p, kind), expert)
            for rows, expert in zip(table, live.experts, strict=True)
            for p, row in enumerate(rows)
            for kind, address in zip(SCALES, row, strict=True)
        )
        for address, size, expert in vectors:
            if not end <= address <= last - size:
                yield (
                    index,
                    expert,
                    f"layer {index} expert {expert}: {size} bytes of scales at {address:#x} are "
                    "outside the layer's or another's",
                )
            else:
                end = address + size


def _scale_size(live: LiveLayer, projection: int, kind: str) -> int:
    table = live.table
    inner = (projection == 2) == (kind == "suh")
    return table.intermediate_size if inner else table.hidden_size
