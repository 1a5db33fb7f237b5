"""The most streams at which p5 of the speed of a stream is at least target x headroom. Pure.

`search` is a generator: it yields what to run (an `Ask`) and is sent the speeds of the turns, so
the same code drives the engine, a simulator with known truth, and a replay.

First roughly: double the streams on short runs until p5 falls below the threshold, then bisect; a
run too near the threshold to be believed is made three times as long. Then surely: the last number
that holds and the first that fails run in turns, block by block, until each is decided.
Alternating them lets a slow drift of the machine touch both alike.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from appliance.bench.level import LOOKS, Level
from appliance.bench.steady import Unsteady, unsteadiness
from appliance.errors import UsageError
from preflight.counted import counted

ROUGH_TURNS = 40
MANY_STREAMS, SWEEP_SHARE = 32, 0.4  # from so many streams on, this share of a linear sweep
WARM_TURNS = 1  # a stream's first turn after the number of streams changed is not counted


@dataclass(frozen=True)
class Goal:
    """`target` in tokens per second and stream; p5 must reach target x headroom."""

    target: float = 40.0
    headroom: float = 1.1
    most_streams: int = 64

    @property
    def threshold(self) -> float:
        return self.target * self.headroom


@dataclass(frozen=True)
class Ask:
    """Run `streams` at once: first `warm_turns` in all that do not count, then `turns` that do.

    `seconds`: after that long a stream begins no turn that counts, but has counted one at least.
    """

    streams: int
    turns: int
    warm_turns: int
    seconds: float | None = None

    @property
    def requests(self) -> int:
        return self.turns + self.warm_turns


@dataclass(frozen=True)
class Capacity:
    """`sure`: both deciding numbers are settled at 95 %. `at_limit`: more was not tried."""

    streams: int
    sure: bool
    at_limit: bool
    levels: Mapping[int, Level]
    unsteady: tuple[Unsteady, ...]


Search = Generator[Ask, Sequence[float], Capacity]


@dataclass
class _Known:
    """What was run so far, and how many requests it took."""

    goal: Goal
    levels: dict[int, Level] = field(default_factory=dict)
    requests: int = 0

    def answer(self, streams: int, pair: Sequence[int]) -> Capacity:
        return Capacity(
            streams=streams,
            sure=all(self.levels[n].sure for n in pair),
            at_limit=streams == self.goal.most_streams,
            levels=dict(sorted(self.levels.items())),
            unsteady=tuple(unsteadiness(self.levels.values())),
        )


def search(goal: Goal) -> Search:
    """Yields what to run next, is sent the speeds (tokens per second), returns the capacity."""
    if goal.target <= 0 or goal.headroom < 1 or goal.most_streams < 1:
        raise UsageError(
            f"target {goal.target:g}, headroom {goal.headroom:g}, "
            f"{counted(goal.most_streams, 'stream')}",
            fix="a target above 0, a headroom of 1 or more, at least one stream",
        )
    known = _Known(goal)
    while True:
        holds = yield from _roughly(known)
        pair = [n for n in (holds, holds + 1) if 1 <= n <= goal.most_streams]
        share = math.inf if holds < MANY_STREAMS else SWEEP_SHARE
        yield from _surely(known, pair, share)
        if all(known.levels[n].verdict == ("holds" if n == holds else "fails") for n in pair):
            return known.answer(holds, pair)
        # The short runs misled: go on from what is decided now.


def _sweep_at_least(known: _Known, streams: int) -> int:
    """Requests of the cheapest linear sweep that ends here: every number up to the next one gets
    its first look, and where ours needed more looks so would the sweep: it decides by this rule."""
    found = 0
    for n in range(1, min(streams + 1, known.goal.most_streams) + 1):
        have = len(known.levels[n].speeds) if n in known.levels else 0
        looks = [look for look in LOOKS if look <= max(have, LOOKS[0])]
        found += looks[-1] + WARM_TURNS * n * len(looks)
    return found


def linear_sweep(goal: Goal) -> Search:
    """The plain way, to compare with: 1, 2, 3 ... streams, each decided, until one fails."""
    known = _Known(goal)
    for n in range(1, goal.most_streams + 1):
        yield from _surely(known, [n], math.inf)
        if known.levels[n].verdict == "fails":
            return known.answer(n - 1, [n])
    return known.answer(goal.most_streams, [goal.most_streams])


def _roughly(known: _Known) -> Generator[Ask, Sequence[float], int]:
    """The most streams that seem to hold; numbers that are decided are not asked again."""
    levels, limit = known.levels, known.goal.most_streams
    fails = min((n for n in levels if levels[n].verdict == "fails"), default=limit + 1)
    holds = start = max(
        (n for n in levels if levels[n].verdict == "holds" and n < fails), default=0
    )
    doubling = True
    while fails - holds > 1:
        n = min(holds + max(1, holds - start), limit) if doubling else (holds + fails) // 2
        if n >= fails:
            doubling = False
            continue
        if n not in levels:
            yield from _block(known, n, ROUGH_TURNS)
        if not levels[n].is_clear() and levels[n].wants():
            yield from _block(known, n, levels[n].wants())
        if levels[n].seems_to_hold():
            holds = n
        else:
            fails, doubling = n, False
    return holds


def _surely(
    known: _Known, pair: Sequence[int], sweep_share: float
) -> Generator[Ask, Sequence[float], None]:
    """Until each is decided: by its bounds, or by the estimate where turns would cost too much."""
    levels = known.levels
    while True:
        open_ = [n for n in pair if n not in levels or levels[n].wants()]
        if not open_:
            return
        for n in open_:
            turns = levels[n].wants() if n in levels else LOOKS[0]
            after = known.requests + turns + WARM_TURNS * n
            looked = n in levels and len(levels[n].speeds) >= LOOKS[0]
            if looked and after > sweep_share * _sweep_at_least(known, max(pair) - 1):
                levels[n].decide()
                continue
            yield from _block(known, n, turns)
            levels[n].look()


def _block(known: _Known, streams: int, turns: int) -> Generator[Ask, Sequence[float], None]:
    ask = Ask(streams, turns, WARM_TURNS * streams)
    known.requests += ask.requests
    speeds = yield ask
    if not speeds:
        raise UsageError(
            f"none of {counted(turns, 'turn')} at {counted(streams, 'stream')} could be measured",
            fix="look at the errors counted in the samples",
        )
    known.levels.setdefault(streams, Level(streams, known.goal.threshold)).add(speeds)
