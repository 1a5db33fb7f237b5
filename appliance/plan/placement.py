"""Which experts of one rank stay on its device: the hottest, until the budget is spent."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """One layer as one rank sees it: its experts, their block, and how hot each one is.

    Beside `experts`: `heat`, expected reads a step if on the host, and `steady`, the share of
    picks in the topic that wants the expert least.
    """

    layer: int
    experts: tuple[int, ...]
    block_bytes: int
    heat: tuple[float, ...]
    steady: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Homes:
    """Global expert numbers: for good on the device, in its slots at the start, on the host.

    `host` includes those in slots: each has its copy there.
    """

    device: tuple[int, ...]
    slots: tuple[int, ...]
    host: tuple[int, ...]


def choose_homes(layer: LayerDemand, permanent: int, slots: int) -> Homes:
    """The hottest stay; with slots, the steadiest stay and the hottest others start in the slots.

    Equals go by the lower number.
    """
    items = list(zip(layer.experts, layer.heat, layer.steady, strict=True))
    hottest = [e for e, _, _ in sorted(items, key=lambda i: (-i[1], i[0]))]
    if not slots:
        return Homes(tuple(hottest[:permanent]), (), tuple(hottest[permanent:]))
    steadiest = sorted(items, key=lambda i: (-i[2], -i[1], i[0]))
    device = tuple(e for e, _, _ in steadiest[:permanent])
    kept = frozenset(device)
    host = tuple(e for e in hottest if e not in kept)
    return Homes(device, host[:slots], host)


def fill(layers: Sequence[LayerDemand], budget_bytes: int) -> tuple[int, ...]:
    """How many experts of each layer fit on the device, hottest first, within the budget."""
    quotas = [0] * len(layers)
    left = budget_bytes
    for position in _by_heat(layers):
        if layers[position].block_bytes <= left:
            left -= layers[position].block_bytes
            quotas[position] += 1
    return tuple(quotas)


def take(layers: Sequence[LayerDemand], count: int) -> tuple[int, ...]:
    """How many experts of each layer the `count` hottest of all are."""
    quotas = [0] * len(layers)
    for _, position in zip(range(count), _by_heat(layers), strict=False):
        quotas[position] += 1
    return tuple(quotas)


def _by_heat(layers: Sequence[LayerDemand]) -> Iterator[int]:
    """Positions of layers, once per expert, hottest expert first.

    Equal heat is spread: the layer that gave fewer experts so far comes first, then the lower one.
    """
    ranked = [sorted(layer.heat, reverse=True) for layer in layers]
    heap = [(-heats[0], 0, position) for position, heats in enumerate(ranked) if heats]
    heapq.heapify(heap)
    while heap:
        _, taken, position = heapq.heappop(heap)
        yield position
        if taken + 1 < len(ranked[position]):
            heapq.heappush(heap, (-ranked[position][taken + 1], taken + 1, position))
