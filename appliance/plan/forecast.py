"""What a plan will cost beside single steps: first reads, loading, topics nobody planned for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.plan.budget import GIB, ON_HOST, TABLES, Demand
from appliance.plan.cost import touched
from appliance.plan.hardware import GpuModel, recognise
from appliance.plan.kernel_curve import H200
from appliance.plan.model import RankPlan
from appliance.plan.outlook import ColdShares, Forecast, PrefillPrediction, Range
from appliance.plan.placement import Homes, LayerDemand, choose_homes
from appliance.plan.predict import LINK_RATE, Layer
from appliance.plan.promise import best_cold
from appliance.plan.routing import Heat

PREFILL_TOKENS = (4096, 32_768, 131_072)
# Share of the card's tensor rate in prefill (low, likely, high): decoding weights takes its part.
PREFILL_RATE = (0.2, 0.35, 0.5)
# Reading the package, bytes a second (low, likely, high), unless the disk was measured.
DISK_RATE = (1e9, 3e9, 7e9)
# Touch and register host memory, seconds a GiB (FACTS section 3), with huge pages and without.
PIN_SECONDS_PER_GIB = (0.05, 0.05, 0.1)
# Imports, processes, graph capture, warm-up. Without a GPU nothing is captured: 24 to 36 s on two
# cores, 30 to 60 over HTTP (ENGINE.md).
START_SECONDS = {"cuda": (30.0, 60.0, 180.0), "cpu": (20.0, 40.0, 120.0)}
# What the settled policy leaves over the clairvoyant slots (docs/measurements/slot-policy.md).
POLICY_OVER_CLAIRVOYANT = 1.1

_UNCALIBRATED = (
    "device work: the kernel was measured on an H200; another card is taken as 0.6 to 1.8 of it"
)
_INDEPENDENT = (
    "rows of a step are taken as independent; consecutive rows of one stream touch about a "
    "quarter fewer experts"
)


def forecast(
    demand: Demand,
    ranks: Sequence[RankPlan],
    layers: Sequence[Layer],
    heat: Heat | None,
    disk_bytes_per_second: float | None,
) -> Forecast:
    """Everything but single steps; parts are left out where a card or its link is unknown."""
    models = [model for rank in ranks if (model := recognise(rank.gpu_name)) is not None]
    rates = [rank.link_bytes_per_second for rank in ranks if rank.link_bytes_per_second]
    known = len(models) == len(rates) == len(ranks)
    cold = _cold_shares(demand, ranks, layers, heat) if heat else None
    said = [_INDEPENDENT] if known else []
    if known and demand.curve == H200:
        said.insert(0, _UNCALIBRATED)
    if heat is None:
        said.append("every expert is taken as equally likely: real routing is skewed, and counts "
                    "make the plan and this forecast better")  # fmt: skip
    elif cold is not None and cold.held_out is not None:
        said.append(f"traffic like the counts: a topic that was left out has {cold.held_out:.1%} "
                    f"of its picks on the host instead of {cold.in_sample:.1%}")  # fmt: skip
    if len({rank.numa_node for rank in ranks} - {None}) > 1:
        said.append("cards on different memory nodes: 1.17 to 1.51 times slower")
    return Forecast(
        prefill=_prefill(demand, ranks, layers, models, rates) if known else (),
        break_even_chunk_tokens=(
            _break_even_chunk(demand, layers, models, rates) if known else None
        ),
        load_seconds=_load_seconds(demand, ranks, disk_bytes_per_second),
        cold=cold,
        assumptions=tuple(said),
    )


def _prefill(
    demand: Demand,
    ranks: Sequence[RankPlan],
    layers: Sequence[Layer],
    models: Sequence[GpuModel],
    rates: Sequence[float],
) -> tuple[PrefillPrediction, ...]:
    """A chunk streams every host expert it touches once; link and arithmetic overlap."""
    out = []
    for tokens in PREFILL_TOKENS:
        chunk = min(tokens, demand.policy.prefill_chunk_tokens)
        chunks = -(-tokens // chunk)
        moved = [
            sum(la.block_bytes * sum(touched(la.chance[e], chunk) for e in la.cold[number])
                for la in layers)
            for number in range(len(ranks))
        ]  # fmt: skip
        seconds = []
        for edge in range(3):
            link = max(size / (rate / demand.curve.zero_copy_share * LINK_RATE[2 - edge])
                       for size, rate in zip(moved, rates, strict=True))  # fmt: skip
            flops = sum(model.tensor_flops for model in models) * PREFILL_RATE[2 - edge]
            seconds.append(max(link, chunk * _flops_per_token(demand) / flops))
        each = Range(low=min(seconds), likely=seconds[1], high=max(seconds))
        out.append(
            PrefillPrediction(
                tokens=tokens,
                seconds=_rounded(each, chunks),
                others_tokens_per_second=Range(
                    low=_figure(1 / each.high),
                    likely=_figure(1 / each.likely),
                    high=_figure(1 / each.low),
                ),
            )
        )
    return tuple(out)


def _break_even_chunk(
    demand: Demand, layers: Sequence[Layer], models: Sequence[GpuModel], rates: Sequence[float]
) -> int:
    link = max(
        sum(la.block_bytes * len(la.cold[number]) for la in layers) / rate
        for number, rate in enumerate(rates)
    )
    flops = sum(model.tensor_flops for model in models) * PREFILL_RATE[1]
    return round(link * demand.curve.zero_copy_share * flops / _flops_per_token(demand))


def _flops_per_token(demand: Demand) -> float:
    """Two per weight a token meets: its routed experts, and the dense parts at a byte a weight."""
    routed = sum(
        la.top_k * sum(p.k * p.n for p in la.experts[0].projections)
        for la in demand.layers if not la.draft
    )  # fmt: skip
    dense = sum(
        part.size_bytes for part in demand.checkpoint.dense
        if part.role not in ("embedding", "vision", "draft")
    )  # fmt: skip
    return 2.0 * (routed + dense)


def _load_seconds(
    demand: Demand, ranks: Sequence[RankPlan], disk_bytes_per_second: float | None
) -> Range:
    """Read the package once, pin the host part of every rank side by side, start the engine."""
    pinned = max(
        sum(i.size_bytes for i in rank.ledger if i.part in (ON_HOST, TABLES)) for rank in ranks
    )
    disk = DISK_RATE if disk_bytes_per_second is None else (disk_bytes_per_second,) * 3
    edges = [
        demand.checkpoint.size_bytes / disk[2 - edge]
        + pinned / GIB * PIN_SECONDS_PER_GIB[edge]
        + START_SECONDS[demand.device][edge]
        for edge in range(3)
    ]
    return Range(low=round(edges[0]), likely=round(edges[1]), high=round(edges[2]))


def _cold_shares(
    demand: Demand, ranks: Sequence[RankPlan], layers: Sequence[Layer], heat: Heat
) -> ColdShares | None:
    """Leave out each topic, choose homes again in the same quotas, and serve it."""
    if demand.expert_parallel:
        return None
    picks = sum(la.top_k for la in layers)
    mine = sum(la.chance[e] for la in layers for e in la.cold[0]) / picks
    static, settled = [], []
    for name in sorted(heat.topics) if len(heat.topics) > 1 else ():
        known, topic = heat.without(name), heat.topic(name)
        homes = {
            place.layer: _rehome(known, place.layer, len(place.device_experts), place.cache_slots)
            for place in ranks[0].layers
            if known.of(place.layer) and topic.of(place.layer)
        }
        first = {layer: frozenset(h.host) - frozenset(h.slots) for layer, h in homes.items()}
        static.append(_share(topic, first))
        settled.append(_share(topic, best_cold(topic, homes)) * POLICY_OVER_CLAIRVOYANT)
    slots = any(place.cache_slots for place in ranks[0].layers)
    return ColdShares(
        in_sample=_figure(mine),
        held_out=_figure(sum(static) / len(static)) if static else None,
        held_out_worst=_figure(max(static)) if static else None,
        held_out_settled=_figure(sum(settled) / len(settled)) if settled and slots else None,
    )


def _rehome(heat: Heat, layer: int, permanent: int, slots: int) -> Homes:
    row = heat.of(layer) or ()
    steady = heat.steady(layer) or row
    return choose_homes(LayerDemand(layer, tuple(range(len(row))), 1, row, steady, ()),
                        permanent, slots)  # fmt: skip


def _share(traffic: Heat, cold: Mapping[int, frozenset[int]]) -> float:
    shares = [
        sum(row[e] for e in away) / sum(row)
        for layer, away in cold.items()
        if (row := traffic.of(layer)) is not None
    ]
    return sum(shares) / len(shares) if shares else 0.0


def _rounded(seconds: Range, times: int) -> Range:
    return Range(low=_figure(seconds.low * times), likely=_figure(seconds.likely * times),
                 high=_figure(seconds.high * times))  # fmt: skip


def _figure(value: float) -> float:
    return float(f"{value:.4g}")
