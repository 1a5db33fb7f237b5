"""Which experts hold a layer's spare slots: decayed counts, two tests of a swap, a link budget.

The engine runs this code and the simulator replays it. It only decides: it never copies a byte.
An expert on the host takes the slot of a colder one when it is hotter by a clear factor and by
more than chance. Counts halve every `half_life_rows` routed rows, so the slots follow the topic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from appliance.plan.model import CacheRules

# A weight this large is folded back into the counts, long before floats lose digits.
_FOLD = 1e30
# Cold picks beyond the promise, in standard deviations, before a plan is doubted.
_DOUBT = 2.0


@dataclass(frozen=True, slots=True)
class Promotion:
    """Copy `expert` into the slot that `evict` holds; `evict` is read from the host again."""

    layer: int
    expert: int
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
    picks: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.picks = [0.0] * self.experts

    def best_swap(self, weight: float, rules: CacheRules) -> tuple[float, Promotion] | None:
        """The swap that gains most, as (gain, promotion); None where none passes both tests."""
        if not self.slots or not self.cold:
            return None
        picks = self.picks
        most = max(map(picks.__getitem__, self.cold))
        least = min(map(picks.__getitem__, self.slots))
        chance = rules.deviations * math.sqrt((most + least) * weight)
        if most <= rules.hysteresis * least or most - least <= chance:
            return None
        # Of equals the lower number comes in and the higher goes.
        hot = min(e for e in self.cold if picks[e] == most)
        weak = max(e for e in self.slots if picks[e] == least)
        return most - least, Promotion(self.layer, hot, weak)


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

    def __post_init__(self) -> None:
        self._by_layer = {layer.layer: layer for layer in self.layers}

    def observe(self, layer: int, experts: Iterable[int]) -> None:
        """Count the experts that one row of this step picked in one layer."""
        mine, weight = self._by_layer[layer], self._weight
        picks, cold = mine.picks, mine.cold
        for expert in experts:
            picks[expert] += weight
            self._picks += weight
            if expert in cold:
                self._cold_picks += weight

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
        return self._cold_picks - expected > _DOUBT * math.sqrt(expected * self._weight)

    def _spend(self) -> list[Promotion]:
        """Largest gains first, over all layers, while the budget lasts."""
        out: list[Promotion] = []
        best = {layer.layer: layer.best_swap(self._weight, self.rules) for layer in self.layers}
        while self._budget >= 1.0:
            found = [swap for swap in best.values() if swap is not None]
            if not found:
                break
            _, swap = max(found, key=lambda item: (item[0], -item[1].layer))
            layer = self._by_layer[swap.layer]
            layer.slots.remove(swap.evict)
            layer.slots.add(swap.expert)
            layer.cold.remove(swap.expert)
            layer.cold.add(swap.evict)
            best[swap.layer] = layer.best_swap(self._weight, self.rules)
            self._budget -= 1.0
            out.append(swap)
        return out

    def _fold(self) -> None:
        for layer in self.layers:
            layer.picks = [count / self._weight for count in layer.picks]
        self._picks /= self._weight
        self._cold_picks /= self._weight
        self._weight = 1.0
