"""Which experts hold the spare slots: those that following the traffic would, or the plan's.

The engine runs this code and the simulator replays it. It only decides: it never copies a byte.
Slots that follow the traffic hold a new topic within some hundred rows. Where many topics are
mixed, so few rows know less than the plan does. So what following would hold is always worked
out, and the slots hold that or what the plan gave them: whichever missed fewer of the recent
picks, by more than chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from appliance.plan.following import (
    Following,
    LayerSlots,
    Promotion,
    carry_out,
    chance,
    with_income,
)
from appliance.plan.model import CacheRules


class Cache:
    """All layers of one rank. Call `observe` for each routed row, then `step` between steps.

    `layers` are what the slots hold now, and are kept up to date here. `planned`: layer -> what
    the plan has in its slots; without it what they hold now.
    """

    def __init__(
        self,
        layers: Sequence[LayerSlots],
        rules: CacheRules | None = None,
        planned: Mapping[int, AbstractSet[int]] | None = None,
    ) -> None:
        self.layers, self.follows = {la.layer: la for la in layers}, True
        self._planned = {la.layer: frozenset(la.slots) for la in layers} | dict(planned or {})
        self._following = Following(layers, rules or CacheRules())
        self._behind = False  # the slots do not hold yet what they should
        self._budget = 0.0
        # Recent picks that only following had left on the host, and that only the plan had.
        self._lost = self._won = 0.0

    @property
    def rules(self) -> CacheRules:
        return self._following.rules

    @rules.setter
    def rules(self, rules: CacheRules) -> None:
        self._following.rules = rules

    def observe(self, layer: int, experts: Iterable[int]) -> None:
        """Count the experts that one row of this step picked in one layer."""
        self.count(layer, [(expert, 1) for expert in experts])

    def count(self, layer: int, picked: Sequence[tuple[int, int]]) -> None:
        """Count what all rows of this step picked in one layer: (expert, picks) pairs."""
        wanted, planned = self._following.layers[layer], self._planned[layer]
        for expert, times in picked:
            if expert in planned:
                if expert in wanted.cold:
                    self._lost += times
            elif expert in wanted.slots:
                self._won += times
        self._following.count(layer, picked)

    def recent(self) -> dict[int, list[float]]:
        """Picks of each expert of each layer, halved every `half_life_rows`: what was learned."""
        return self._following.recent()

    def recall(self, learned: Mapping[int, Sequence[float]]) -> None:
        """Begin with what an earlier run learned (`recent`); layers it does not know stay as is."""
        self._following.recall(learned)

    def step(self, rows: int) -> list[Promotion]:
        """Close a step of `rows` rows: the promotions to carry out before the next one.

        They are already applied here: the caller must carry out each, or rebuild the cache.
        """
        self._budget = with_income(self._budget, self.rules, rows)
        swaps = self._following.step(rows)
        ahead = self._lost - self._won if self.follows else self._won - self._lost
        if ahead > chance(self._lost + self._won):
            self.follows, self._behind = not self.follows, True
        kept = 0.5 ** (rows / self.rules.half_life_rows)
        self._lost, self._won = self._lost * kept, self._won * kept
        if not self._behind and not (self.follows and swaps):
            return []
        return self._catch_up()

    def _catch_up(self) -> list[Promotion]:
        """Swaps towards what the slots should hold, largest gains first, while the budget lasts."""
        swaps = [swap for _, swap in sorted(self._missing(), key=lambda found: -found[0])]
        done = swaps[: int(self._budget)]
        self._budget -= len(done)
        self._behind = len(done) < len(swaps)
        for swap in done:
            carry_out(swap, self.layers[swap.layer], self.layers[swap.evict_layer])
        return done

    def _missing(self) -> Iterator[tuple[float, Promotion]]:
        """Every swap that is left to do, and its gain in recent picks: the hottest for the coldest.

        Of equals the lower number comes in and the higher goes.
        """
        for pool in self._following.pools:
            enter, leave = [], []
            for la in pool:
                held = self.layers[la.layer].slots
                target = la.slots if self.follows else self._planned[la.layer]
                enter += [(-la.picks[e], la.layer, e) for e in target - held]
                leave += [(la.picks[e], la.layer, -e) for e in held - target]
            for (hot, layer, expert), (weak, other, evict) in zip(
                sorted(enter), sorted(leave), strict=True
            ):
                yield -hot - weak, Promotion(layer, expert, other, -evict)
