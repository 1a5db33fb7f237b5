"""Plan without a topic, then serve it: how fast the slots find what the plan could not know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from appliance.errors import UsageError
from appliance.plan.contenders import NAMES, contenders, one_pool
from appliance.plan.cost import row_probabilities, touched
from appliance.plan.model import CacheRules
from appliance.plan.placement import Homes, LayerDemand, choose_homes, take
from appliance.plan.promise import promised_cold_share
from appliance.plan.routing import Heat
from appliance.plan.simulate import Window, even_mix, replay
from appliance.plan.traffic import Row, switch, topic_rows

# Rows [start, stop): just after the topic came, and when the slots have settled.
WINDOWS = ((500, 1000), (2000, 2500))
# Rows of one stream repeat themselves: keeping 3 of 8 picks makes six consecutive rows of these
# topics touch 22 experts where six independent ones touch 30 (public traces: 20 to 29 by layer).
CONSECUTIVE_STICKINESS = 0.375


@dataclass(frozen=True, slots=True)
class Split:
    """How layers are shared out: on average `held` experts of each on the device, at most `slots`
    of them as spare slots. The planner gives flat layers more and skewed ones fewer, for steps of
    `streams` rows; `even` gives each the same."""

    top_k: int
    held: int
    slots: int
    even: bool = False
    streams: int = 6


def split_homes(heat: Heat, split: Split) -> dict[int, Homes]:
    """Homes of every layer of these counts, as the planner would choose them where no link rate
    is known: the fewest distinct reads a step."""
    demands = []
    for layer, row in sorted(heat.counts.items()):
        if not 0 <= split.slots <= split.held <= len(row):
            raise UsageError(f"{split.held} of {len(row)} experts with {split.slots} of them as "
                             "slots is not a split")  # fmt: skip
        chance = row_probabilities(row, len(row), split.top_k)
        reads = sorted((touched(p, split.streams) for p in chance), reverse=True)
        demands.append(LayerDemand(layer, tuple(range(len(row))), 1, chance,
                                   heat.steady(layer) or chance, tuple(reads)))  # fmt: skip
    held = [split.held] * len(demands) if split.even else take(demands, split.held * len(demands))
    return {
        demand.layer: choose_homes(demand, n - min(n, split.slots), min(n, split.slots))
        for demand, n in zip(demands, held, strict=True)
    }


def serve(
    planned: Heat,
    topics: Sequence[Heat],
    split: Split,
    rules: CacheRules,
    rows: Mapping[int, Iterator[Row]],
    batch: int,
    windows: Sequence[tuple[int, int]] = WINDOWS,
    names: Sequence[str] = NAMES,
) -> tuple[Window, ...]:
    """Replay rows on a plan made from `planned`; the clairvoyant knows `topics`, in equal parts."""
    homes = split_homes(planned, split)
    static = split_homes(Heat(planned.counts), replace(split, slots=0))
    promised = promised_cold_share(planned, homes, one_pool(homes) if rules.pooled else None)
    told = rules.model_copy(update={"promised_cold_share": promised})
    left = {layer: frozenset(h.host) for layer, h in static.items()}
    rivals = contenders(homes, left, Heat(even_mix(topics)), told)
    return replay({name: rivals[name] for name in names}, rows, batch, windows)


@dataclass(frozen=True, slots=True)
class Trial:
    """One replay: the topics served, on a plan that did or did not know them."""

    topics: tuple[str, ...]
    windows: tuple[Window, ...]


def trials(
    heat: Heat,
    groups: Iterable[tuple[str, ...]],
    split: Split,
    rules: CacheRules,
    batch: int,
    seed: str,
    stickiness: float = 0.0,
    labelled: bool = True,
    names: Sequence[str] = NAMES,
) -> list[Trial]:
    """Serve each group of topics, interleaved, on a plan from which the group was left out.

    labelled=False: the plan knows the sum of the other topics, not each of them.
    """
    out = []
    for group in groups:
        planned = _left_out(heat, group)
        topics = [heat.topic(name) for name in group]
        rows = {la: topic_rows(topics, la, split.top_k, batch, seed, stickiness)
                for la in heat.counts}  # fmt: skip
        known = planned if labelled else Heat(planned.counts)
        out.append(Trial(group, serve(known, topics, split, rules, rows, batch, names=names)))
    return out


def switch_trials(
    heat: Heat,
    split: Split,
    rules: CacheRules,
    batch: int,
    seed: str,
    after: int = 2000,
    names: Sequence[str] = NAMES,
) -> list[Trial]:
    """Serve one left-out topic for `after` rows, then another; measured from the switch on."""
    order = sorted(heat.topics)
    out = []
    for first, then in zip(order, order[1:] + order[:1], strict=True):
        topics = [heat.topic(first), heat.topic(then)]
        each = [{la: topic_rows([t], la, split.top_k, batch, seed) for la in heat.counts}
                for t in topics]  # fmt: skip
        rows = {la: switch(each[0][la], after, each[1][la]) for la in heat.counts}
        windows = tuple((start + after, stop + after) for start, stop in WINDOWS)
        planned = _left_out(heat, (first, then))
        found = serve(planned, topics[1:], split, rules, rows, batch, windows, names)
        out.append(Trial((first, then), found))
    return out


def own_plan_trials(
    heat: Heat,
    split: Split,
    rules: CacheRules,
    batch: int,
    seed: str,
    names: Sequence[str] = NAMES,
) -> list[Trial]:
    """Serve each topic on a plan made for it alone."""
    out = []
    for name in sorted(heat.topics):
        topic = heat.topic(name)
        rows = {la: topic_rows([topic], la, split.top_k, batch, seed) for la in topic.counts}
        found = serve(topic, [topic], split, rules, rows, batch, names=names)
        out.append(Trial((name,), found))
    return out


def _left_out(heat: Heat, names: tuple[str, ...]) -> Heat:
    for name in names:
        heat = heat.without(name)
    return heat
