"""What following the traffic would hold in slots: decayed counts, two tests of a swap, a budget.

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
_MOST_HALVINGS = 900.0  # of a step: after so many nothing is left, and floats end at 2 ** 1024
# Asked after every step, chance alone may answer once in ten thousand times (Bernstein's bound,
# which also holds for the few picks of the first rows).
_DOUBT = math.log(1e4)


def chance(picks: float) -> float:
    """Picks more than expected that chance may bring, where `picks` are expected."""
    return math.sqrt(2 * _DOUBT * picks) + _DOUBT * 2 / 3


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
    """One layer: the experts in its slots, and those on the host only.

    Permanent residents take no part: they are in neither set. Members are global expert numbers.
    """

    layer: int
    experts: int
    slots: set[int]
    cold: set[int]
    block_bytes: int = 0


@dataclass(slots=True)
class Followed(LayerSlots):
    """And the recent picks of each expert, by its number."""

    picks: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.picks = [0.0] * self.experts

    def hottest_cold(self) -> float:
        """Recent picks of the hottest expert that is on the host only."""
        return max(map(self.picks.__getitem__, self.cold), default=-math.inf)

    def coldest_slot(self) -> float:
        """Recent picks of the coldest expert in a slot."""
        return min(map(self.picks.__getitem__, self.slots), default=math.inf)


def carry_out(swap: Promotion, enters: LayerSlots, leaves: LayerSlots) -> None:
    """The swap in the sets of its two layers, which may be one."""
    enters.cold.remove(swap.expert)
    enters.slots.add(swap.expert)
    leaves.slots.remove(swap.evict)
    leaves.cold.add(swap.evict)


def with_income(budget: float, rules: CacheRules, rows: int) -> float:
    """Promotions that may be made after `rows` more rows; what is not spent is kept for a burst."""
    rate = rules.promotions_per_row
    return min(budget + rate * rows, max(1.0, rate * rules.burst_rows))


class Following:
    """All layers of one rank, from what their slots hold now. Call `count` for what a step picked,
    then `step`."""

    def __init__(self, layers: Sequence[LayerSlots], rules: CacheRules) -> None:
        self.rules = rules
        self.layers = {
            la.layer: Followed(la.layer, la.experts, set(la.slots), set(la.cold), la.block_bytes)
            for la in layers
        }
        pools: dict[int, list[Followed]] = {}
        for layer in self.layers.values():
            pool = layer.block_bytes if rules.pooled else layer.layer
            pools.setdefault(pool, []).append(layer)
        self.pools = list(pools.values())
        self._weight, self._budget = 1.0, 0.0
        self._picks = self._cold_picks = 0.0

    def count(self, layer: int, picked: Iterable[tuple[int, int]]) -> None:
        """Count what all rows of this step picked in one layer: (expert, picks) pairs."""
        mine, weight = self.layers[layer], self._weight
        picks, cold = mine.picks, mine.cold
        for expert, times in picked:
            seen = times * weight
            picks[expert] += seen
            self._picks += seen
            if expert in cold:
                self._cold_picks += seen

    def recent(self) -> dict[int, list[float]]:
        """Picks of each expert of each layer, halved every `half_life_rows`: what was learned."""
        return {number: [n / self._weight for n in la.picks] for number, la in self.layers.items()}

    def recall(self, learned: Mapping[int, Sequence[float]]) -> None:
        """Begin with what an earlier run learned (`recent`); layers it does not know stay as is."""
        for layer, counts in learned.items():
            mine = self.layers.get(layer)
            if mine is not None and len(counts) == mine.experts:
                mine.picks = [count * self._weight for count in counts]

    def step(self, rows: int) -> list[Promotion]:
        """Close a step of `rows` rows: the swaps made here because of it."""
        self._budget = with_income(self._budget, self.rules, rows)
        out = self._spend() if self._budget >= 1.0 and self._plan_is_broken() else []
        self._weight *= 2.0 ** min(rows / self.rules.half_life_rows, _MOST_HALVINGS)
        if self._weight > _FOLD:
            self._fold()
        return out

    def _plan_is_broken(self) -> bool:
        """More picks were cold than promised, by more than chance: else nothing is swapped."""
        expected = self.rules.promised_cold_share * self._picks
        if not expected:  # nothing was promised
            return self._cold_picks > 0
        allowed = chance(expected / self._weight) * self._weight
        return self._cold_picks - expected > allowed

    def _spend(self) -> list[Promotion]:
        """Largest gains first, over all layers, while the budget lasts."""
        out: list[Promotion] = []
        hot = {la.layer: la.hottest_cold() for la in self.layers.values()}
        weak = {la.layer: la.coldest_slot() for la in self.layers.values()}
        while self._budget >= 1.0:
            pairs = [
                (max(pool, key=lambda la: (hot[la.layer], -la.layer)),
                 min(pool, key=lambda la: (weak[la.layer], la.layer)))
                for pool in self.pools
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
        for layer in self.layers.values():
            layer.picks = [count / self._weight for count in layer.picks]
        self._picks /= self._weight
        self._cold_picks /= self._weight
        self._weight = 1.0


def _swap(enter: Followed, hot: float, leave: Followed, weak: float) -> Promotion:
    """Of equals the lower number comes in and the higher goes."""
    expert = min(e for e in enter.cold if enter.picks[e] == hot)
    evict = max(e for e in leave.slots if leave.picks[e] == weak)
    swap = Promotion(enter.layer, expert, leave.layer, evict)
    carry_out(swap, enter, leave)
    return swap
