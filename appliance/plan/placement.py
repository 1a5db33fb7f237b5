"""Which experts of one rank stay on its device: those that save most time, until it is full."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """One layer as one rank sees it: its experts, their block, and how hot each one is.

    Beside `experts`: `heat`, expected reads a step if on the host, and `steady`, the share of
    picks in the topic that wants the expert least. `gains`: seconds of a step that the first,
    second, ... expert on the device saves, never rising. `known`: from counts, not assumed.
    """

    layer: int
    experts: tuple[int, ...]
    block_bytes: int
    heat: tuple[float, ...]
    steady: tuple[float, ...]
    gains: tuple[float, ...]
    known: bool = True


@dataclass(frozen=True, slots=True)
class Homes:
    """Global expert numbers: for good on the device, in its slots at the start, on the host.

    `host` includes those in slots: each has its copy there.
    """

    device: tuple[int, ...]
    slots: tuple[int, ...]
    host: tuple[int, ...]


def choose_homes(layer: LayerDemand, permanent: int, slots: int) -> Homes:
    """The hottest start on the device; the steadiest of those stay, the others are in the slots.

    So nothing on the host only is hotter than what the device holds. Equals go by the lower number.
    """
    items = list(zip(layer.experts, layer.heat, layer.steady, strict=True))
    hottest = sorted(items, key=lambda i: (-i[1], i[0]))
    held = hottest[: permanent + slots]
    steadiest = sorted(held, key=lambda i: (-i[2], -i[1], i[0])) if slots else held
    device = tuple(e for e, _, _ in steadiest[:permanent])
    kept = frozenset(device)
    host = tuple(e for e, _, _ in hottest if e not in kept)
    return Homes(device, host[:slots], host)


def fill(layers: Sequence[LayerDemand], budget_bytes: int) -> tuple[int, ...]:
    """How many experts of each layer stay on the device: largest gain per byte first.

    Gains never rise within a layer, so this is the best there is where all blocks are of one
    size, and within one block of it elsewhere.
    """
    quotas = [0] * len(layers)
    left = budget_bytes
    for position in by_gain(layers):
        if layers[position].block_bytes <= left:
            left -= layers[position].block_bytes
            quotas[position] += 1
    return tuple(quotas)


def take(layers: Sequence[LayerDemand], count: int) -> tuple[int, ...]:
    """How many experts of each layer are among the `count` that gain most."""
    quotas = [0] * len(layers)
    for _, position in zip(range(count), by_gain(layers), strict=False):
        quotas[position] += 1
    return tuple(quotas)


def by_gain(layers: Sequence[LayerDemand]) -> Iterator[int]:
    """Positions of layers, once per expert, largest gain per byte first.

    Equal gains are spread: the layer that gave fewer experts so far comes first, then the lower
    one. Gains are compared at nine digits, so that rounding in a sum does not order equals.
    """
    ranked = [[float(f"{g / la.block_bytes:.9e}") for g in la.gains] for la in layers]
    heap = [(-values[0], 0, position) for position, values in enumerate(ranked) if values]
    heapq.heapify(heap)
    while heap:
        _, taken, position = heapq.heappop(heap)
        yield position
        if taken + 1 < len(ranked[position]):
            heapq.heappush(heap, (-ranked[position][taken + 1], taken + 1, position))
