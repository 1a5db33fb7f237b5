"""Which experts hold a layer's spare slots: decayed counts, two tests of a swap, a link budget.

The engine runs this code and the simulator replays it. It only decides: it never copies a byte.
An expert on the host takes the slot of a colder one when it is hotter by a clear factor and by
more than chance. Counts halve every `half_life_rows` routed rows, so the slots follow the topic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from appliance.plan.model import CacheRules

# A weight this large is folded back into the counts, long before floats lose digits.
_FOLD = 1e30
# A plan is asked after every step whether it keeps its promise: chance alone may say no once in
# ten thousand times (Bernstein's bound, which also holds for the few picks of the first rows).
_DOUBT = math.log(1e4)


@dataclass(frozen=True, slots=True)
class Promotion:
    """Copy `expert` of `layer` into the slot that `evict` of `evict_layer` holds; the latter is
    read from the host again. Both blocks are of one size."""

    layer: int
    expert: int
    evict_layer: int
    evict: int


@dataclass(slots=True)
class LayerSlots:
    """One layer: the experts in its slots, those on the host only, and recent picks of each.

    Permanent residents take no part: they are in neither set. Set members and the index of
    `picks` are global expert numbers.
    """

    layer: int
    experts: int
    slots: set[int]
    cold: set[int]
    block_bytes: int = 0
    picks: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.picks = [0.0] * self.experts

    def hottest_cold(self) -> float:
        """Recent picks of the hottest expert that is on the host only."""
        return max(map(self.picks.__getitem__, self.cold), default=-math.inf)

    def coldest_slot(self) -> float:
        """Recent picks of the coldest expert in a slot."""
        return min(map(self.picks.__getitem__, self.slots), default=math.inf)


@dataclass(slots=True)
class Cache:
    """All layers of one rank. Call `observe` for each routed row, then `step` between steps."""

    layers: Sequence[LayerSlots]
    rules: CacheRules = field(default_factory=CacheRules)
    _weight: float = 1.0
    _budget: float = 0.0
    _picks: float = 0.0
    _cold_picks: float = 0.0
    _by_layer: dict[int, LayerSlots] = field(init=False)
    _pools: list[list[LayerSlots]] = field(init=False)

    def __post_init__(self) -> None:
        self._by_layer = {layer.layer: layer for layer in self.layers}
        pools: dict[int, list[LayerSlots]] = {}
        for layer in self.layers:
            pool = layer.block_bytes if self.rules.pooled else layer.layer
            pools.setdefault(pool, []).append(layer)
        self._pools = list(pools.values())

    def observe(self, layer: int, experts: Iterable[int]) -> None:
        """Count the experts that one row of this step picked in one layer."""
        self.count(layer, ((expert, 1) for expert in experts))

    def count(self, layer: int, picked: Iterable[tuple[int, int]]) -> None:
        """Count what all rows of this step picked in one layer: (expert, picks) pairs."""
        mine, weight = self._by_layer[layer], self._weight
        picks, cold = mine.picks, mine.cold
        for expert, times in picked:
            seen = times * weight
            picks[expert] += seen
            self._picks += seen
            if expert in cold:
                self._cold_picks += seen

    def recent(self) -> dict[int, list[float]]:
        """Picks of each expert of each layer, halved every `half_life_rows`: what was learned."""
        return {la.layer: [count / self._weight for count in la.picks] for la in self.layers}

    def recall(self, learned: Mapping[int, Sequence[float]]) -> None:
        """Begin with what an earlier run learned (`recent`); layers it does not know stay as is."""
        for layer, counts in learned.items():
            mine = self._by_layer.get(layer)
            if mine is not None and len(counts) == mine.experts:
                mine.picks = [count * self._weight for count in counts]

    def step(self, rows: int) -> list[Promotion]:
        """Close a step of `rows` rows: the promotions to carry out before the next one.

        They are already applied here: the caller must carry out each, or rebuild the cache.
        """
        rate = self.rules.promotions_per_row
        self._budget = min(self._budget + rate * rows, max(1.0, rate * self.rules.burst_rows))
        out = self._spend() if self._budget >= 1.0 and self._plan_is_broken() else []
        self._weight *= 2.0 ** (rows / self.rules.half_life_rows)
        if self._weight > _FOLD:
            self._fold()
        return out

    def _plan_is_broken(self) -> bool:
        """More picks were cold than promised, by more than chance: else the plan is left alone."""
        expected = self.rules.promised_cold_share * self._picks
        if not expected:  # nothing was promised
            return self._cold_picks > 0
        chance = math.sqrt(2 * _DOUBT * expected * self._weight) + _DOUBT * self._weight * 2 / 3
        return self._cold_picks - expected > chance

    def _spend(self) -> list[Promotion]:
        """Largest gains first, over all layers, while the budget lasts."""
        out: list[Promotion] = []
        hot = {la.layer: la.hottest_cold() for la in self.layers}
        weak = {la.layer: la.coldest_slot() for la in self.layers}
        while self._budget >= 1.0:
            pairs = [
                (max(pool, key=lambda la: (hot[la.layer], -la.layer)),
                 min(pool, key=lambda la: (weak[la.layer], la.layer)))
                for pool in self._pools
            ]  # fmt: skip
            enter, leave = max(pairs, key=lambda pair: hot[pair[0].layer] - weak[pair[1].layer])
            if not self._is_clear(hot[enter.layer], weak[leave.layer]):
                break
            out.append(_swap(enter, hot[enter.layer], leave, weak[leave.layer]))
            for layer in (enter, leave):
                hot[layer.layer], weak[layer.layer] = layer.hottest_cold(), layer.coldest_slot()
            self._budget -= 1.0
        return out

    def _is_clear(self, hot: float, weak: float) -> bool:
        """Hotter by the factor asked for, and by more than chance."""
        if not (hot > self.rules.hysteresis * weak):
            return False
        return hot - weak > self.rules.deviations * math.sqrt((hot + weak) * self._weight)

    def _fold(self) -> None:
        for layer in self.layers:
            layer.picks = [count / self._weight for count in layer.picks]
        self._picks /= self._weight
        self._cold_picks /= self._weight
        self._weight = 1.0


def _swap(enter: LayerSlots, hot: float, leave: LayerSlots, weak: float) -> Promotion:
    """Of equals the lower number comes in and the higher goes."""
    expert = min(e for e in enter.cold if enter.picks[e] == hot)
    evict = max(e for e in leave.slots if leave.picks[e] == weak)
    enter.cold.remove(expert)
    enter.slots.add(expert)
    leave.slots.remove(evict)
    leave.cold.add(evict)
    return Promotion(enter.layer, expert, leave.layer, evict)
