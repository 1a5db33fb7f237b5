"""Run a capacity search, or a fixed load, against an endpoint, into a record; or replay it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from appliance.bench.capacity import Ask, Capacity, search
from appliance.bench.client import Endpoint
from appliance.bench.load import Load
from appliance.bench.record import Block, Record
from appliance.bench.room import Room
from appliance.bench.samples import Sample
from appliance.bench.turns import Session
from appliance.errors import ApplianceError, UsageError

TURNS, MOST_TURNS = 120, 1_000_000
Counters = Mapping[str, float]


@dataclass(frozen=True)
class Target:
    """What is measured, and how to ask about it.

    `sessions` of a tag: each block takes its own, so that a prefix cache finds only what sessions
    share, and the same block of another record gets the same. `counters` and `engine` say what the
    engine counts and which start of it this is; None: unknown. `told`: before each block. `room`:
    what the server holds; None: unknown, and every turn is sent.
    """

    endpoint: Endpoint
    sessions: Callable[[str], Iterator[Session]]
    counters: Callable[[], Counters | None]
    engine: Callable[[], str | None]
    told: Callable[[Ask, int], None]
    room: Room | None = None


def measure_capacity(record: Record, target: Target) -> Capacity:
    """Finish the search of this start; blocks that it already has are not run again."""
    start = _start(record, target.engine())
    run = _Run(record, target, start)
    steps = search(record.stamp.goal)
    ask = next(steps)
    while True:
        try:
            ask = steps.send(run(ask))
        except StopIteration as done:
            found: Capacity = done.value
            return found


def measure_turns(record: Record, target: Target, *asks: Ask) -> None:
    """One block each, all of one start of the engine."""
    run = _Run(record, target, _start(record, target.engine()))
    run.have = []
    for ask in asks:
        run(ask)


def measure_until(record: Record, target: Target, streams: Sequence[int], end: float) -> None:
    """Until `end` of time.monotonic: each number of streams twice, up and down the list, so that a
    drift of the machine touches all alike. What is under way at the end does not count.

    A block begins no turn after its share of the time that is left; the turns that it has begun
    may take longer, and then the blocks after it get less.
    """
    run = _Run(record, target, _start(record, target.engine()), end)
    run.have = []
    order = (*streams, *reversed(streams))
    for number, n in enumerate(order):
        left = end - time.monotonic()
        if left <= 0:
            return
        run(Ask(n, MOST_TURNS, n, round(left / (len(order) - number), 3)))


def replay(record: Record, start: int) -> Capacity | None:
    """The answer of one start from its record alone; None: the search was not finished."""
    have = [block for block in record.blocks if block.start == start]
    steps = search(record.stamp.goal)
    ask = next(steps)
    for block in have:
        _must_match(block, ask)
        try:
            ask = steps.send(record.speeds(block))
        except StopIteration as done:
            found: Capacity = done.value
            return found
    return None


class _Run:
    def __init__(self, record: Record, target: Target, start: int, end: float = math.inf) -> None:
        self.record, self.target, self.start = record, target, start
        self.end = end
        self.have = [block for block in record.blocks if block.start == start]
        self.next = len(self.have)
        self.samples: list[Sample] = []

    def __call__(self, ask: Ask) -> list[float]:
        if self.have:
            block = self.have.pop(0)
            _must_match(block, ask)
            return self.record.speeds(block)
        self.target.told(ask, self.next)
        self.samples.clear()
        sessions = self.target.sessions(f"{self.start}.{self.next}")
        load = Load(
            self.target.endpoint,
            sessions,
            self.samples.append,
            self.start,
            blocks=self.next,
            room=self.target.room,
        )
        before, began, clock = self.target.counters(), time.time(), time.monotonic()
        speeds = load.run(ask, self.end)
        seconds = time.monotonic() - clock
        block = Block(
            start=self.start,
            number=self.next,
            ask=ask,
            began=began,
            seconds=seconds,
            samples=len(self.samples),
            engine=self.target.engine(),
            counters=grown(before, self.target.counters()),
        )
        self.record.add(block, self.samples)
        self.next += 1
        return speeds


def _start(record: Record, engine: str | None) -> int:
    """An unfinished start is continued; after a finished one the engine must be a fresh one."""
    if not record.blocks:
        return 0
    last = record.blocks[-1]
    if record.stamp.kind == "capacity" and replay(record, last.start) is None:
        if last.engine != engine:
            raise UsageError(
                "the engine was restarted in the middle of a measurement",
                fix="another --out: one start of the engine is measured as a whole",
            )
        return last.start
    if record.stamp.kind == "capacity" and engine is not None and engine == last.engine:
        raise UsageError(
            f"this start of the engine is measured already (start {last.start})",
            fix="restart it (`appliance down`, `appliance up --detach`) and run this again",
        )
    if record.stamp.kind == "turns" and engine == last.engine:
        return last.start  # the same start, or nobody can say that it is another
    return last.start + 1


def _must_match(block: Block, ask: Ask) -> None:
    if block.ask != ask:
        raise ApplianceError(
            f"block {block.number} of start {block.start} ran {block.ask}, the search asks {ask}",
            fix="replay with the release that made the record, or measure again",
        )


def grown(before: Counters | None, after: Counters | None) -> dict[str, float] | None:
    if before is None or after is None:
        return None
    return {name: after[name] - before[name] for name in before if name in after}
