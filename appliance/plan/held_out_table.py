"""plan simulate --held-out: each topic left out of a plan like this one, then served: a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from appliance.errors import UsageError
from appliance.plan.contenders import NAMES
from appliance.plan.held_out import (
    CONSECUTIVE_STICKINESS,
    WINDOWS,
    Split,
    Trial,
    own_plan_trials,
    switch_trials,
    trials,
)
from appliance.plan.model import CacheRules, Plan
from appliance.plan.routing import Heat
from appliance.plan.simulate import Link
from appliance.plan.simulate_plan import mean_block_bytes

BATCHES = (1, 2, 4, 6, 8)
_HEADER = (
    "| traffic | rows | rule | cold picks (least to most over draws) | worst | of clairvoyant | "
    "distinct cold a layer | link ms a step | promotions a row |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Study:
    """What is replayed: counts by topic, how layers are shared out, rules of the whole model.

    `layers`: of the model; counts of a few of them get their part of the promotions. No link: its
    rate is unknown.
    """

    heat: Heat
    split: Split
    rules: CacheRules
    layers: int
    link: Link | None

    @property
    def part(self) -> float:
        return len(self.heat.counts) / self.layers

    @property
    def shared_rules(self) -> CacheRules:
        rate = self.rules.promotions_per_row * self.part
        return self.rules.model_copy(update={"promotions_per_row": rate})


def study_of(plan: Plan, heat: Heat) -> Study:
    """A plan like this one, in whatever the counts say: as many experts held, as many slots."""
    rank, model = plan.ranks[0], plan.model
    held = sum(len(p.device_experts) + p.cache_slots for p in rank.layers)
    slots = max(p.cache_slots for p in rank.layers)
    rate = rank.link_bytes_per_second
    link = None if rate is None else Link(model.layers, mean_block_bytes(plan), rate)
    split = Split(model.top_k, held // len(rank.layers), slots, streams=plan.serving.streams)
    return Study(heat, split, plan.cache or CacheRules(), model.layers, link)


Draw = Callable[[str], list[Trial]]


def held_out_lines(study: Study, seeds: Sequence[str]) -> Iterator[str]:
    """A line per traffic, window and rule: the mean over topics, and its range over the draws.

    Raises UsageError for counts with fewer than two topics.
    """
    if len(study.heat.topics) < 2:
        raise UsageError(
            f"the counts know {len(study.heat.topics)} topics: leaving one out takes two or more",
            fix="give counts that carry topics",
        )
    yield _HEADER
    for title, draw in _traffics(study):
        yield from _rows(title, [draw(seed) for seed in seeds], study)


def _traffics(study: Study) -> Iterator[tuple[str, Draw]]:
    """Every kind of traffic; last what slots apart and layers of one size would do."""
    heat, split, rules = study.heat, study.split, study.shared_rules
    names = sorted(heat.topics)
    alone = [(name,) for name in names]
    for batch in BATCHES:
        yield f"held out, {batch} rows", _of(heat, alone, split, rules, batch)
    yield "held out, 6 consecutive", _of(heat, alone, split, rules, 6, CONSECUTIVE_STICKINESS)
    bare = _of(heat, alone, split, rules, 4, labelled=False)
    yield "held out, topics not labelled, 4 rows", bare
    for size in range(2, min(4, len(names) - 1) + 1, 2):
        groups = list(combinations(names, size))
        yield f"{size} held out, 4 rows", _of(heat, groups, split, rules, 4)
    yield ("another topic held out since, 4 rows",
           lambda seed: switch_trials(heat, split, rules, 4, seed))  # fmt: skip
    yield "planned topic, 4 rows", lambda seed: own_plan_trials(heat, split, rules, 4, seed)
    even, apart = replace(split, even=True), rules.model_copy(update={"pooled": False})
    for batch in (1, 4, 6):
        yield f"even layers, held out, {batch} rows", _of(heat, alone, even, apart, batch)
    yield ("even layers, planned topic, 4 rows",
           lambda seed: own_plan_trials(heat, even, apart, 4, seed))  # fmt: skip
    yield "unequal, slots apart, held out, 4 rows", _of(heat, alone, split, apart, 4)


def _of(
    heat: Heat,
    groups: Sequence[tuple[str, ...]],
    split: Split,
    rules: CacheRules,
    batch: int,
    stickiness: float = 0.0,
    labelled: bool = True,
) -> Draw:
    return lambda seed: trials(heat, groups, split, rules, batch, seed, stickiness, labelled)


def _rows(title: str, draws: Sequence[Sequence[Trial]], study: Study) -> Iterator[str]:
    """One line per window and contender, averaged over the trials of every draw."""
    for number, (start, stop) in enumerate(WINDOWS):
        windows = [trial.windows[number] for found in draws for trial in found]
        best = _mean([w.cold_share["clairvoyant"] for w in windows])
        for name in NAMES:
            means = [_mean([t.windows[number].cold_share[name] for t in found]) for found in draws]
            worst = max(w.cold_share[name] for w in windows)
            distinct = _mean([w.distinct_cold[name] for w in windows])
            swaps = _mean([w.promotions_per_row[name] for w in windows]) / study.part
            link = f"{study.link.milliseconds(distinct):.2f}" if study.link else "unknown"
            yield (
                f"| {title} | {start}-{stop} | {name} | {_mean(means):.2%} ({min(means):.2%} to "
                f"{max(means):.2%}) | {worst:.2%} | {_mean(means) / best:.2f} | {distinct:.2f} | "
                f"{link} | {swaps:.2f} |"
            )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
