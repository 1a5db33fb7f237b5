"""What a plan will cost a decode step: bytes over each link, and milliseconds by their cause."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist

from appliance.plan.budget import Demand
from appliance.plan.cost import cold_layer_seconds, row_probabilities, touched
from appliance.plan.hardware import GpuModel, recognise
from appliance.plan.kernel_curve import H200
from appliance.plan.model import RankPlan
from appliance.plan.outlook import Range, StreamPrediction
from appliance.plan.routing import Heat

STREAMS = (1, 2, 4, 6, 8)
# Each triple is low, likely, high. Share of peak memory rate that dense layers get at few rows:
DENSE_RATE = (0.5, 0.7, 0.9)
# Seconds a layer spends on launches, small kernels and, over ranks, two all-reduces:
LAYER_SECONDS = (20e-6, 32e-6, 80e-6)
# No step is shorter: what the engine's processes do between two steps, on one rank (three layers
# on an H200: 1.7 ms) and over several (four on two: 2.1 to 2.7). Another processor may take more.
LEAST_STEP_SECONDS = (1.2e-3, 1.7e-3, 3e-3)
LEAST_STEP_SECONDS_OVER_RANKS = (1.5e-3, 2.4e-3, 3.6e-3)
# EXL3 matrices beside the experts are bound by their decoding: one launch for those that share
# inputs (two of attention's four). Fitted to 21 to 168 M weights on an H200 (h200-data-plane.md).
LINEAR_WEIGHTS_PER_SECOND = 3.4e12
LINEAR_SECONDS = 3.6e-6
# Device work on experts where the curve is not from this card: the kernel is bound by its
# decoding, not by memory, and was measured on an H200 only:
OTHER_CARD = (0.6, 1.0, 1.8)
# A link carries other things too (FACTS section 3: 0.925 to 0.93 of the copy engine):
LINK_RATE = (0.9, 1.0, 1.05)
# GPUs on different memory nodes: 1.17x to 1.51x slower (FACTS section 1).
FAR_CARDS = (0.17, 0.34, 0.51)
_NORMAL = NormalDist()
_EACH_STEP = (
    "attention", "mlp", "shared experts", "router", "norm", "head", "lookup", "other",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one step, by cause: the slowest rank of each layer."""

    compute: Range
    waiting: Range
    topology: Range


@dataclass(frozen=True, slots=True)
class Layer:
    """One MoE layer as a step meets it: what a row picks, and what each rank reads from where."""

    chance: tuple[float, ...]
    top_k: int
    block_bytes: int
    cold: tuple[tuple[int, ...], ...]  # by rank
    held: tuple[tuple[int, ...], ...]


def step_layers(demand: Demand, ranks: Sequence[RankPlan], heat: Heat | None) -> tuple[Layer, ...]:
    """The target's layers as the plan starts: what is in a slot is held."""
    out = []
    for position, moe in enumerate(demand.layers):
        if moe.draft:
            continue
        chance = row_probabilities(
            heat.of(moe.index) if heat else None, len(moe.experts), moe.top_k
        )
        cold, held = [], []
        for rank in ranks:
            place = rank.layers[position]
            away = place.host_experts - place.slot_experts
            cold.append(tuple(sorted(away)))
            held.append(tuple(sorted(place.device_experts | place.slot_experts)))
        out.append(Layer(chance, moe.top_k, demand.block_bytes(moe), tuple(cold), tuple(held)))
    return tuple(out)


def predict(
    demand: Demand, ranks: Sequence[RankPlan], layers: Sequence[Layer]
) -> tuple[StreamPrediction, ...]:
    """One prediction per number of streams."""
    picks = sum(la.top_k for la in layers) * (1 if demand.expert_parallel else len(ranks))
    cold = sum(la.chance[e] for la in layers for away in la.cold for e in away)
    return tuple(_prediction(demand, ranks, layers, rows, cold / picks) for rows in STREAMS)


def _prediction(
    demand: Demand,
    ranks: Sequence[RankPlan],
    layers: Sequence[Layer],
    rows: int,
    cold_share: float,
) -> StreamPrediction:
    reads = [tuple(touched(p, rows) for p in layer.chance) for layer in layers]
    moved = [
        sum(layer.block_bytes * sum(read[e] for e in layer.cold[number])
            for layer, read in zip(layers, reads, strict=True))
        for number in range(len(ranks))
    ]  # fmt: skip
    times = [
        size / rank.link_bytes_per_second * 1e3
        for rank, size in zip(ranks, moved, strict=True)
        if rank.link_bytes_per_second
    ]
    step = step_seconds(demand, ranks, layers, reads)
    return StreamPrediction(
        streams=rows,
        link_bytes_per_step=round(max(moved)),
        link_ms_per_step=round(max(times), 3) if len(times) == len(ranks) else None,
        cold_share=round(cold_share, 6),
        compute_ms=None if step is None else _milliseconds(step.compute),
        waiting_ms=None if step is None else _milliseconds(step.waiting),
        topology_ms=None if step is None else _milliseconds(step.topology),
        tokens_per_second=None if step is None else _speed(step),
    )


def step_seconds(
    demand: Demand,
    ranks: Sequence[RankPlan],
    layers: Sequence[Layer],
    reads: Sequence[Sequence[float]],
) -> StepSeconds | None:
    """Seconds of a step that reads experts with these probabilities; None where a card or a link
    is unknown."""
    models = [model for rank in ranks if (model := recognise(rank.gpu_name)) is not None]
    rates = [rank.link_bytes_per_second for rank in ranks if rank.link_bytes_per_second]
    if len(models) < len(ranks) or len(rates) < len(ranks):
        return None
    far = len({rank.numa_node for rank in ranks} - {None}) > 1
    least = LEAST_STEP_SECONDS if len(ranks) == 1 else LEAST_STEP_SECONDS_OVER_RANKS
    computes, waits, lost = [], [], []
    for edge in range(3):
        compute = total = 0.0
        for layer, read in zip(layers, reads, strict=True):
            alone, planned = _layer_seconds(demand, layer, read, rates, edge)
            compute += alone
            total += planned
        dense = max(_dense_seconds(demand, *card, edge) for card in zip(ranks, models, strict=True))
        computed = compute + dense + len(layers) * LAYER_SECONDS[edge]
        waits.append(total - compute)
        computes.append(max(computed, least[edge] - waits[-1]))
        lost.append(FAR_CARDS[edge] * (computes[-1] + waits[-1]) if far else 0.0)
    return StepSeconds(_range(computes), _range(waits), _range(lost))


def _layer_seconds(
    demand: Demand, layer: Layer, read: Sequence[float], rates: Sequence[float], edge: int
) -> tuple[float, float]:
    """Seconds of one layer's experts on its slowest rank: all on the device, and as planned."""
    seen: dict[tuple[float, tuple[int, ...]], tuple[float, float]] = {}
    draws: list[tuple[float, float]] = []  # by rank: expected seconds, and their deviation
    of_all: list[float] = []  # expected share of a step's picks that wait on this rank
    other = _other_card(demand, edge)
    for number, rate in enumerate(rates):
        cold = layer.cold[number]
        if (rate, cold) in seen and not demand.expert_parallel:
            continue
        waiting = tuple(read[e] for e in cold)
        work = sum(waiting) + sum(read[e] for e in layer.held[number])
        device = demand.curve.device_seconds(work * layer.block_bytes) * other
        block, link = layer.block_bytes, rate * LINK_RATE[2 - edge]
        planned = cold_layer_seconds(waiting, block, link, demand.curve, device)
        seen[rate, cold] = (device, planned)
        spread = math.sqrt(sum(p * (1 - p) for p in waiting)) * block / link
        draws.append((planned, spread))
        of_all.append(sum(waiting) / max(1e-9, sum(read)))
    alone = max(d for d, _ in seen.values())
    if not demand.expert_parallel:
        return alone, slowest(draws, in_common(read, {cold for _, cold in seen}))
    # Picks of one rank are not another's: the more of a step's picks wait, the more so.
    share = sum(of_all) / len(of_all)
    return alone, slowest(draws, -share / (1 - share) if share < 0.5 else -1.0)


def in_common(read: Sequence[float], colds: Collection[tuple[int, ...]]) -> float:
    """Correlation of what two ranks of a tensor-parallel plan read of one layer: the same picks,
    but of the experts that each has on its host. 1 where all have the same ones there."""

    def variance(experts: Collection[int]) -> float:
        return sum(read[e] * (1 - read[e]) for e in experts)

    found = []
    for one, other in combinations(sorted(colds), 2):
        size = math.sqrt(variance(one) * variance(other))
        found.append(variance(set(one) & set(other)) / size if size else 1.0)
    return sum(found) / len(found) if found else 1.0


def _other_card(demand: Demand, edge: int) -> float:
    """How many times as long decoding may take here; 1 where the curve is from this card."""
    return OTHER_CARD[edge] if demand.curve == H200 else 1.0


def slowest(draws: Sequence[tuple[float, float]], correlation: float = 0.0) -> float:
    """Expected largest of these (mean, deviation), each two of them so correlated.

    Which experts a step picks differs from rank to rank, and every layer waits for the last: that
    is later than the later of the means. Source: C. E. Clark, The greatest of a finite set of
    random variables (1961), normal approximation, one after another.
    """
    mean, spread = draws[0]
    for other, its_spread in draws[1:]:
        apart = math.sqrt(
            max(0.0, spread**2 + its_spread**2 - 2 * correlation * spread * its_spread)
        )
        if not apart:
            mean, spread = max((mean, spread), (other, its_spread))
            continue
        at = (mean - other) / apart
        above, density = _NORMAL.cdf(at), _NORMAL.pdf(at)
        first = mean * above + other * (1 - above) + apart * density
        second = (
            (mean**2 + spread**2) * above
            + (other**2 + its_spread**2) * (1 - above)
            + (mean + other) * apart * density
        )
        mean, spread = first, math.sqrt(max(0.0, second - first**2))
    return mean


def _dense_seconds(demand: Demand, rank: RankPlan, model: GpuModel, edge: int) -> float:
    """Seconds for what every step reads beside routed experts."""
    size = sum(i.size_bytes for i in rank.ledger if i.home == "device" and i.part in _EACH_STEP)
    count, weights = demand.linears
    linears = count * LINEAR_SECONDS
    linears += weights / demand.ranks / LINEAR_WEIGHTS_PER_SECOND * _other_card(demand, edge)
    rate = model.memory_bytes_per_second * DENSE_RATE[2 - edge]
    return size / rate + linears


def _speed(step: StepSeconds) -> Range:
    """Tokens a second of each stream."""
    parts = (step.compute, step.waiting, step.topology)
    return Range(
        low=_figure(1 / sum(part.high for part in parts)),
        likely=_figure(1 / sum(part.likely for part in parts)),
        high=_figure(1 / sum(part.low for part in parts)),
    )


def _range(values: Sequence[float]) -> Range:
    return Range(low=min(values), likely=values[1], high=max(values))


def _milliseconds(seconds: Range) -> Range:
    return Range(low=round(seconds.low * 1e3, 3), likely=round(seconds.likely * 1e3, 3),
                 high=round(seconds.high * 1e3, 3))  # fmt: skip


def _figure(value: float) -> float:
    return float(f"{value:.4g}")
