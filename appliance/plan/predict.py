"""What a plan will cost: expected bytes over each link and milliseconds of a decode step."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.plan.budget import Demand
from appliance.plan.cost import row_probabilities, touched
from appliance.plan.model import RankPlan, StreamPrediction
from appliance.plan.routing import Heat

STREAMS = (1, 2, 4, 6)


def predict(
    demand: Demand, ranks: Sequence[RankPlan], heat: Heat | None
) -> tuple[StreamPrediction, ...]:
    """One prediction per number of streams, for the rank whose link takes longest."""
    return tuple(_step(demand, ranks, heat, rows) for rows in STREAMS)


def _step(
    demand: Demand, ranks: Sequence[RankPlan], heat: Heat | None, rows: int
) -> StreamPrediction:
    moved = [0.0] * len(ranks)
    cold = picks = 0.0
    for position, layer in enumerate(demand.layers):
        if layer.draft:
            continue
        counts = heat.of(layer.index) if heat else None
        chance = row_probabilities(counts, len(layer.experts), layer.top_k)
        picks += layer.top_k * (1 if demand.expert_parallel else len(ranks))
        for number, rank in enumerate(ranks):
            on_host = rank.layers[position].host_experts
            cold += sum(chance[e] for e in on_host)
            block = demand.block_bytes(layer)
            moved[number] += block * sum(touched(chance[e], rows) for e in on_host)
    times = [
        None if rank.link_bytes_per_second is None else size / rank.link_bytes_per_second * 1e3
        for rank, size in zip(ranks, moved, strict=True)
    ]
    known = [time for time in times if time is not None]
    return StreamPrediction(
        streams=rows,
        link_bytes_per_step=round(max(moved)),
        link_ms_per_step=round(max(known), 3) if len(known) == len(times) else None,
        cold_share=round(cold / picks, 6),
    )
