"""The cold share that a plan with slots can promise, from the topics it knows."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.plan.placement import Homes
from appliance.plan.routing import Heat

# Which layers share their slots: layer -> pool. None: each keeps its own.
Pools = Mapping[int, int] | None


def promised_cold_share(heat: Heat, homes: Mapping[int, Homes], pools: Pools = None) -> float:
    """The cold share of the planned topic that the best slots serve best; 0 without topics.

    Traffic that does no worse than this is traffic the plan was made for.
    """
    shares = []
    for name in heat.topics:
        topic = heat.topic(name)
        rows = {layer: row for layer in homes if (row := topic.of(layer)) is not None}
        if rows:
            cold = best_cold(topic, {layer: homes[layer] for layer in rows}, pools)
            lost = [sum(row[e] for e in cold[layer]) / sum(row) for layer, row in rows.items()]
            shares.append(sum(lost) / len(lost))
    return min(shares, default=0.0)


def best_cold(
    traffic: Heat, homes: Mapping[int, Homes], pools: Pools = None
) -> dict[int, frozenset[int]]:
    """What the clairvoyant leaves on the host: the slots hold the traffic's own hottest.

    In a pool the slots go to whichever layer wants them most: each layer's picks weigh the same.
    """
    pool_of = {layer: layer if pools is None else pools[layer] for layer in homes}
    left = dict.fromkeys(pool_of.values(), 0)
    wanted = []
    for layer, home in homes.items():
        left[pool_of[layer]] += len(home.slots)
        row = traffic.of(layer)
        total = sum(row) if row else 1.0
        wanted += [(-(row[e] / total if row else 0.0), layer, e) for e in home.host]
    cold: dict[int, set[int]] = {layer: set() for layer in homes}
    for _, layer, expert in sorted(wanted):
        if left[pool_of[layer]]:
            left[pool_of[layer]] -= 1
        else:
            cold[layer].add(expert)
    return {layer: frozenset(experts) for layer, experts in cold.items()}
