"""The most streams at which p5 of the speed of a stream is at least target x headroom. Pure.

`search` is a generator: it yields what to run (an `Ask`) and is sent the speeds of the turns, so
the same code drives the engine, a simulator with known truth, and a replay.

First roughly: double the streams on short runs until p5 falls below the threshold, then bisect.
Then surely: the last number that holds and the first that fails run in turns, block by block, until
each is decided. Alternating them lets a slow drift of the machine touch both alike.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from appliance.bench.level import LOOKS, Level
from appliance.bench.steady import Unsteady, unsteadiness
from appliance.errors import UsageError

ROUGH_TURNS = 40
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
    """Run `streams` at once: first `warm_turns` in all that do not count, then `turns` that do."""

    streams: int
    turns: int
    warm_turns: int

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


def search(goal: Goal) -> Search:
    """Yields what to run next, is sent the speeds (tokens per second), returns the capacity."""
    if goal.target <= 0 or goal.headroom < 1 or goal.most_streams < 1:
        raise UsageError(
            f"target {goal.target:g}, headroom {goal.headroom:g}, {goal.most_streams} streams",
            fix="a target above 0, a headroom of 1 or more, at least one stream",
        )
    levels: dict[int, Level] = {}
    rough = ROUGH_TURNS
    while True:
        holds = yield from _roughly(goal, levels, rough)
        pair = [n for n in (holds, holds + 1) if 1 <= n <= goal.most_streams]
        yield from _surely(goal, levels, pair)
        if all(levels[n].verdict == ("holds" if n == holds else "fails") for n in pair):
            break
        rough *= 2  # the short runs misled
    return Capacity(
        streams=holds,
        sure=all(levels[n].sure for n in pair),
        at_limit=holds == goal.most_streams,
        levels=dict(sorted(levels.items())),
        unsteady=tuple(unsteadiness(levels.values())),
    )


def linear_sweep(goal: Goal) -> Search:
    """The plain way, to compare with: 1, 2, 3 ... streams, each decided, until one fails."""
    levels: dict[int, Level] = {}
    for n in range(1, goal.most_streams + 1):
        yield from _surely(goal, levels, [n])
        if levels[n].verdict == "fails":
            return Capacity(n - 1, levels[n].sure, False, levels, ())
    return Capacity(goal.most_streams, True, True, levels, ())


def _roughly(
    goal: Goal, levels: dict[int, Level], turns: int
) -> Generator[Ask, Sequence[float], int]:
    """The most streams that seem to hold; numbers that are decided are not asked again."""
    limit = goal.most_streams
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
        missing = turns - (len(levels[n].speeds) if n in levels else 0)
        if missing > 0:
            yield from _block(goal, levels, n, missing)
        if levels[n].seems_to_hold():
            holds = n
        else:
            fails, doubling = n, False
    return holds


def _surely(
    goal: Goal, levels: dict[int, Level], pair: Sequence[int]
) -> Generator[Ask, Sequence[float], None]:
    while True:
        open_ = [n for n in pair if n not in levels or levels[n].wants()]
        if not open_:
            return
        for n in open_:
            turns = levels[n].wants() if n in levels else LOOKS[0]
            yield from _block(goal, levels, n, turns)
            levels[n].look()


def _block(
    goal: Goal, levels: dict[int, Level], streams: int, turns: int
) -> Generator[Ask, Sequence[float], None]:
    speeds = yield Ask(streams, turns, WARM_TURNS * streams)
    if not speeds:
        raise UsageError(
            f"none of {turns} turns at {streams} streams could be measured",
            fix="look at the errors counted in the samples",
        )
    levels.setdefault(streams, Level(streams, goal.threshold)).add(speeds)
