"""The cold share that a plan with slots can promise, from the topics it knows."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.plan.placement import Homes
from appliance.plan.routing import Heat


def promised_cold_share(heat: Heat, homes: Mapping[int, Homes]) -> float:
    """The cold share of the planned topic that the best slots serve best; 0 without topics.

    Traffic that does no worse than this is traffic the plan was made for.
    """
    shares = []
    for name in heat.topics:
        topic = heat.topic(name)
        rows = {layer: row for layer in homes if (row := topic.of(layer)) is not None}
        if rows:
            cold = best_cold(topic, {layer: homes[layer] for layer in rows})
            lost = [sum(row[e] for e in cold[layer]) / sum(row) for layer, row in rows.items()]
            shares.append(sum(lost) / len(lost))
    return min(shares, default=0.0)


def best_cold(traffic: Heat, homes: Mapping[int, Homes]) -> dict[int, frozenset[int]]:
    """What the clairvoyant leaves on the host: the slots hold the traffic's own hottest."""
    out: dict[int, frozenset[int]] = {}
    for layer, home in homes.items():
        row = traffic.of(layer) or ()
        order = sorted(home.host, key=lambda e: (-row[e], e))
        out[layer] = frozenset(order[len(home.slots) :])
    return out
