"""Rules for the spare slots, side by side: what a replay compares.

The plan left alone; plain LRU; decayed counts (plan/policy.py, what the engine runs); and two that
know the traffic's own counts: `clairvoyant`, the best slots there are, from the first row on, and
`paced`, which fetches those same slots at the pace that the policy may.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from appliance.plan.following import LayerSlots
from appliance.plan.model import CacheRules
from appliance.plan.placement import Homes
from appliance.plan.policy import Cache
from appliance.plan.promise import best_cold
from appliance.plan.routing import Heat
from appliance.plan.traffic import Row

NAMES = ("static", "lru", "decayed", "paced", "clairvoyant")


class Contender(Protocol):
    """A rule for the slots: which experts are cold now, and what it does with what it sees."""

    def cold(self, layer: int) -> AbstractSet[int]: ...
    def see(self, layer: int, rows: Sequence[Row]) -> None: ...
    def step(self, rows: int) -> int: ...


class Fixed:
    """Slots that never change: a static plan, or the clairvoyant set."""

    def __init__(self, cold: Mapping[int, AbstractSet[int]]) -> None:
        self._cold = cold

    def cold(self, layer: int) -> AbstractSet[int]:
        return self._cold[layer]

    def see(self, layer: int, rows: Sequence[Row]) -> None:
        pass

    def step(self, rows: int) -> int:
        return 0


class Lru:
    """Every cold pick takes the slot that was used longest ago, at once and at any price."""

    def __init__(self, homes: Mapping[int, Homes]) -> None:
        self._slots = {layer: dict.fromkeys(reversed(h.slots)) for layer, h in homes.items()}
        self._cold = {layer: set(h.host) - set(h.slots) for layer, h in homes.items()}
        self._swaps = 0

    def cold(self, layer: int) -> AbstractSet[int]:
        return self._cold[layer]

    def see(self, layer: int, rows: Sequence[Row]) -> None:
        slots, cold = self._slots[layer], self._cold[layer]
        for expert in (e for row in rows for e in row):
            if expert in slots:
                del slots[expert]
            elif expert in cold and slots:
                oldest = next(iter(slots))
                del slots[oldest]
                cold.add(oldest)
                cold.remove(expert)
                self._swaps += 1
            else:
                continue
            slots[expert] = None

    def step(self, rows: int) -> int:
        swaps, self._swaps = self._swaps, 0
        return swaps


class Decayed:
    """The engine's policy."""

    def __init__(self, homes: Mapping[int, Homes], experts: int, rules: CacheRules) -> None:
        self._layers = {
            layer: LayerSlots(layer, experts, set(h.slots), set(h.host) - set(h.slots))
            for layer, h in homes.items()
        }
        self._cache = Cache(tuple(self._layers.values()), rules)

    def cold(self, layer: int) -> AbstractSet[int]:
        return self._layers[layer].cold

    def see(self, layer: int, rows: Sequence[Row]) -> None:
        for row in rows:
            self._cache.observe(layer, row)

    def step(self, rows: int) -> int:
        return len(self._cache.step(rows))


class Paced:
    """Knows what is coming and swaps the largest gains first, as fast as the policy is allowed.

    What it leaves cold above the clairvoyant set is the budget's doing; the policy cannot do
    better than this.
    """

    def __init__(self, homes: Mapping[int, Homes], traffic: Heat, rules: CacheRules) -> None:
        self._cold = {layer: set(h.host) - set(h.slots) for layer, h in homes.items()}
        self._rules, self._budget = rules, 0.0
        best = best_cold(traffic, homes, one_pool(homes) if rules.pooled else None)
        pools = [list(homes)] if rules.pooled else [[layer] for layer in homes]
        self._swaps = sorted(
            swap for pool in pools for swap in self._wanted(traffic, homes, best, pool)
        )

    def _wanted(
        self,
        traffic: Heat,
        homes: Mapping[int, Homes],
        best: Mapping[int, AbstractSet[int]],
        pool: Sequence[int],
    ) -> Iterator[tuple[float, tuple[int, int], tuple[int, int]]]:
        """Gain and (layer, expert) of what comes in and what leaves: hottest for coldest."""
        rows = {layer: traffic.of(layer) or (1.0,) for layer in pool}
        share = {(la, e): row[e] / sum(row) for la, row in rows.items() for e in range(len(row))}
        enter = [(la, e) for la in pool for e in self._cold[la] - best[la]]
        leave = [(la, e) for la in pool for e in best[la] & set(homes[la].slots)]
        enter.sort(key=lambda who: (-share[who], who))
        leave.sort(key=lambda who: (share[who], who))
        for come, go in zip(enter, leave, strict=True):
            yield share[come] - share[go], come, go

    def cold(self, layer: int) -> AbstractSet[int]:
        return self._cold[layer]

    def see(self, layer: int, rows: Sequence[Row]) -> None:
        pass

    def step(self, rows: int) -> int:
        self._budget += self._rules.promotions_per_row * rows
        done = 0
        while self._swaps and self._budget >= 1.0:
            _, (layer, expert), (other, evicted) = self._swaps.pop()
            self._cold[layer].remove(expert)
            self._cold[other].add(evicted)
            self._budget -= 1.0
            done += 1
        return done


def one_pool(layers: Iterable[int]) -> dict[int, int]:
    """All layers share their slots: they do where their blocks are of one size."""
    return dict.fromkeys(layers, 0)


def contenders(
    homes: Mapping[int, Homes],
    static_cold: Mapping[int, AbstractSet[int]],
    traffic: Heat,
    rules: CacheRules,
) -> dict[str, Contender]:
    """Every rule on one plan; `traffic` is what the clairvoyant knows is coming."""
    experts = max(len(row) for row in traffic.counts.values())
    pools = one_pool(homes) if rules.pooled else None
    return {
        "static": Fixed(static_cold),
        "lru": Lru(homes),
        "decayed": Decayed(homes, experts, rules),
        "paced": Paced(homes, traffic, rules),
        "clairvoyant": Fixed(best_cold(traffic, homes, pools)),
    }
