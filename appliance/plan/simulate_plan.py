"""plan simulate: rows replayed on a plan as it is, by topic or from a recorded trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from appliance.errors import UsageError
from appliance.plan.contenders import NAMES, contenders
from appliance.plan.model import CacheRules, Plan
from appliance.plan.placement import Homes
from appliance.plan.routing import Heat
from appliance.plan.simulate import Link, Window, replay
from appliance.plan.traffic import Row, topic_rows

ROWS = 2500


def simulate_lines(plan: Plan, heat: Heat, batch: int, seed: str = "1") -> list[str]:
    """Draw rows of each topic of `heat` (of all of it, without topics) and replay them."""
    topics = {name: heat.topic(name) for name in sorted(heat.topics)} or {"all counts": heat}
    lines = [_header(plan, batch)]
    for name, topic in topics.items():
        layers = [layer for layer in _homes(plan) if topic.of(layer) is not None]
        rows = {la: topic_rows([topic], la, plan.model.top_k, batch, seed) for la in layers}
        lines += _replayed(plan, name, rows, topic, batch, ROWS)
    return lines


def trace_lines(plan: Plan, rows: Mapping[int, Sequence[Row]], batch: int) -> list[str]:
    """Replay a recorded trace in its own order, in steps of `batch` rows."""
    kept = {layer: seen for layer, seen in rows.items() if layer in _homes(plan)}
    length = min((len(seen) for seen in kept.values()), default=0) // batch * batch
    if not length:
        raise UsageError(f"the trace has no step of {batch} rows in a layer of this plan")
    counts = {layer: [0.0] * plan.model.experts for layer in kept}
    for layer, seen in kept.items():
        for expert in (e for row in seen[:length] for e in row):
            if expert >= plan.model.experts:
                raise UsageError(f"the trace picks expert {expert} in layer {layer}, and the plan "
                                 f"is for {plan.model.experts}")  # fmt: skip
            counts[layer][expert] += 1
    traffic = Heat({layer: tuple(row) for layer, row in counts.items()})
    streams: dict[int, Iterator[Row]] = {layer: iter(seen) for layer, seen in kept.items()}
    return [_header(plan, batch), *_replayed(plan, "trace", streams, traffic, batch, length)]


def _replayed(
    plan: Plan, name: str, rows: Mapping[int, Iterator[Row]], traffic: Heat, batch: int, length: int
) -> Iterator[str]:
    if not rows:
        raise UsageError("the counts know no layer of this plan")
    homes = {layer: home for layer, home in _homes(plan).items() if layer in rows}
    rules = plan.cache or CacheRules()
    part = len(rows) / plan.model.layers
    rules = rules.model_copy(update={"promotions_per_row": rules.promotions_per_row * part})
    start = {layer: frozenset(h.host) - frozenset(h.slots) for layer, h in homes.items()}
    window = replay(contenders(homes, start, traffic, rules), rows, batch,
                    [(length // 2 // batch * batch, length)])[0]  # fmt: skip
    for rule in NAMES:
        yield _line(plan, name, rule, window, part)


def _header(plan: Plan, batch: int) -> str:
    slots = max(place.cache_slots for place in plan.ranks[0].layers)
    return (
        f"second half of the rows, {batch} a step, up to {slots} slots a layer\n"
        f"{'traffic':<16}{'rule':<13}{'cold picks':>11}{'distinct cold a layer':>23}"
        f"{'link ms a step':>16}{'promotions a row':>18}"
    )


def _line(plan: Plan, name: str, rule: str, window: Window, part: float) -> str:
    rank, distinct = plan.ranks[0], window.distinct_cold[rule]
    rate = rank.link_bytes_per_second
    link = "unknown"
    if rate is not None:
        per_step = Link(plan.model.layers, mean_block_bytes(plan), rate).milliseconds(distinct)
        link = f"{per_step:.2f}"
    return (
        f"{name:<16}{rule:<13}{window.cold_share[rule]:>11.2%}{distinct:>23.2f}{link:>16}"
        f"{window.promotions_per_row[rule] / part:>18.2f}"
    )


def mean_block_bytes(plan: Plan) -> int:
    """Mean block of the first rank, from its ledger and its lists."""
    rank = plan.ranks[0]
    total = sum(i.size_bytes for i in rank.ledger if i.part.startswith("routed experts,"))
    return total // max(1, sum(len(p.device_experts | p.host_experts) for p in rank.layers))


def _homes(plan: Plan) -> dict[int, Homes]:
    """Every layer's homes; under expert parallelism the ranks' parts together."""
    out: dict[int, Homes] = {}
    for rank in plan.ranks if plan.expert_parallel else plan.ranks[:1]:
        for place in rank.layers:
            mine = out.get(place.layer, Homes((), (), ()))
            out[place.layer] = Homes(
                (*mine.device, *sorted(place.device_experts)),
                (*mine.slots, *sorted(place.slot_experts)),
                (*mine.host, *sorted(place.host_experts)),
            )
    return out
