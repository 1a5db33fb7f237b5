"""Which experts of one rank stay on its device: the hottest, until the budget is spent."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerDemand:
    """One layer as one rank sees it: its experts, their block, and how hot each one is."""

    layer: int
    experts: tuple[int, ...]
    block_bytes: int
    heat: tuple[float, ...]  # beside `experts`: expected reads a step, if on the host

    @property
    def hottest_first(self) -> tuple[int, ...]:
        """Global ids by falling heat; equal heat goes by the lower id."""
        order = sorted(
            zip(self.experts, self.heat, strict=True), key=lambda item: (-item[1], item[0])
        )
        return tuple(expert for expert, _ in order)


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
