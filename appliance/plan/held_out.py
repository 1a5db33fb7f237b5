"""Plan without a topic, then serve it: how fast the slots find what the plan could not know.

`plan simulate` prints `held_out_lines`; docs/measurements/slot-policy.md keeps one run of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from appliance.errors import UsageError
from appliance.plan.cost import row_probabilities
from appliance.plan.model import CacheRules
from appliance.plan.placement import Homes, LayerDemand, choose_homes
from appliance.plan.promise import promised_cold_share
from appliance.plan.routing import Heat
from appliance.plan.simulate import NAMES, Link, Window, contenders, even_mix, replay
from appliance.plan.traffic import Row, switch, topic_rows

# Rows [start, stop): just after the topic came, and when the slots have settled.
WINDOWS = ((500, 1000), (2000, 2500))
BATCHES = (1, 2, 4, 6, 8)
# Rows of one stream repeat themselves: keeping 3 of 8 picks makes six consecutive rows of these
# topics touch 22 experts where six independent ones touch 30 (public traces: 20 to 29 by layer).
CONSECUTIVE_STICKINESS = 0.375


@dataclass(frozen=True, slots=True)
class Split:
    """How a layer is shared out: `held` experts on the device, `slots` of them as spare slots."""

    top_k: int
    held: int
    slots: int


def split_homes(heat: Heat, split: Split) -> dict[int, Homes]:
    """Homes of every layer of these counts, as the planner would choose them."""
    out: dict[int, Homes] = {}
    for layer, row in sorted(heat.counts.items()):
        if not 0 <= split.slots <= split.held <= len(row):
            raise UsageError(f"{split.held} of {len(row)} experts with {split.slots} of them as "
                             "slots is not a split")  # fmt: skip
        chance = row_probabilities(row, len(row), split.top_k)
        steady = heat.steady(layer) or chance
        demand = LayerDemand(layer, tuple(range(len(row))), 1, chance, steady, gains=())
        out[layer] = choose_homes(demand, split.held - split.slots, split.slots)
    return out


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
    static = split_homes(Heat(planned.counts), Split(split.top_k, split.held, 0))
    told = rules.model_copy(update={"promised_cold_share": promised_cold_share(planned, homes)})
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
    heat: Heat, split: Split, rules: CacheRules, batch: int, seed: str, after: int = 2000
) -> list[Trial]:
    """Serve one left-out topic for `after` rows, then another; measured from the switch on."""
    names = sorted(heat.topics)
    out = []
    for first, then in zip(names, names[1:] + names[:1], strict=True):
        topics = [heat.topic(first), heat.topic(then)]
        each = [{la: topic_rows([t], la, split.top_k, batch, seed) for la in heat.counts}
                for t in topics]  # fmt: skip
        rows = {la: switch(each[0][la], after, each[1][la]) for la in heat.counts}
        windows = tuple((start + after, stop + after) for start, stop in WINDOWS)
        planned = _left_out(heat, (first, then))
        found = serve(planned, topics[1:], split, rules, rows, batch, windows)
        out.append(Trial((first, then), found))
    return out


def own_plan_trials(
    heat: Heat, split: Split, rules: CacheRules, batch: int, seed: str
) -> list[Trial]:
    """Serve each topic on a plan made for it alone."""
    out = []
    for name in sorted(heat.topics):
        topic = heat.topic(name)
        rows = {la: topic_rows([topic], la, split.top_k, batch, seed) for la in topic.counts}
        out.append(Trial((name,), serve(topic, [topic], split, rules, rows, batch)))
    return out


def _left_out(heat: Heat, names: tuple[str, ...]) -> Heat:
    for name in names:
        heat = heat.without(name)
    return heat


def held_out_lines(
    heat: Heat, split: Split, rules: CacheRules, link: Link, seed: str = "1"
) -> list[str]:
    """The whole table: single topics held out, two and four interleaved, and planned topics.

    `rules` are for the whole model; counts of a few layers get their part of the promotions.
    """
    part = len(heat.counts) / link.layers
    shared = rules.promotions_per_row * part
    pooled = rules.model_copy(update={"promotions_per_row": shared, "pooled": True})
    rules = pooled.model_copy(update={"pooled": False})
    names = sorted(heat.topics)
    alone = [(name,) for name in names]
    lines = [_header()]
    for batch in BATCHES:
        found = trials(heat, alone, split, rules, batch, seed)
        lines += _rows(f"held out, {batch} rows", found, link, part)
    found = trials(heat, alone, split, pooled, 4, seed)
    lines += _rows("held out, one pool, 4 rows", found, link, part)
    sticky = trials(heat, alone, split, rules, 6, seed, CONSECUTIVE_STICKINESS)
    lines += _rows("held out, 6 consecutive", sticky, link, part)
    bare = trials(heat, alone, split, rules, 4, seed, labelled=False)
    lines += _rows("held out, topics not labelled, 4 rows", bare, link, part)
    for size in (2, 4):
        found = trials(heat, combinations(names, size), split, rules, 4, seed)
        lines += _rows(f"{size} held out, 4 rows", found, link, part)
    switched = switch_trials(heat, split, rules, 4, seed)
    lines += _rows("another topic held out since, 4 rows", switched, link, part)
    own = own_plan_trials(heat, split, rules, 4, seed)
    return lines + _rows("planned topic, 4 rows", own, link, part)


def _header() -> str:
    return (
        "| traffic | rows | rule | cold picks | worst | of clairvoyant | distinct cold a layer | "
        "link ms a step | promotions a row |\n|---|---|---|---|---|---|---|---|---|"
    )


def _rows(title: str, found: Sequence[Trial], link: Link, part: float) -> list[str]:
    """One line per window and contender, averaged over the trials."""
    lines = []
    for number, (start, stop) in enumerate(WINDOWS):
        windows = [trial.windows[number] for trial in found]
        best = _mean([w.cold_share["clairvoyant"] for w in windows])
        for name in NAMES:
            cold = [w.cold_share[name] for w in windows]
            distinct = _mean([w.distinct_cold[name] for w in windows])
            swaps = _mean([w.promotions_per_row[name] for w in windows]) / part
            lines.append(
                f"| {title} | {start}-{stop} | {name} | {_mean(cold):.2%} | {max(cold):.2%} | "
                f"{_mean(cold) / best:.2f} | {distinct:.2f} | {link.milliseconds(distinct):.2f} | "
                f"{swaps:.2f} |"
            )
    return lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
