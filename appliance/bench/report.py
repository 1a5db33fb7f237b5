"""What a record says, as rows and lines. Pure: the same record, the same report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from appliance.bench.bounds import lower_bound, quantile
from appliance.bench.capacity import Capacity
from appliance.bench.level import LOOK_CONFIDENCE
from appliance.bench.measure import replay
from appliance.bench.record import FEWEST_STARTS, Block, Record
from appliance.bench.samples import LEAST_TOKENS, Sample, problem_lines, problems
from appliance.errors import CheckFailed
from preflight.counted import counted


@dataclass(frozen=True)
class Line:
    """One number of streams over all starts. Speeds in tokens per second and stream; seconds.

    `worst`: the lowest median of any one stream in a block. `cache_hits`, `cold`: shares, 0 to 1.
    """

    streams: int
    turns: int
    median: float
    p5: float
    p5_at_least: float | None
    worst: float
    first_token_p95: float | None
    cache_hits: float | None
    cold: float | None
    host_bytes_per_token: float | None


@dataclass(frozen=True)
class Report:
    """`streams`: the smallest answer of all starts; None: no search was finished."""

    lines: tuple[Line, ...]
    capacities: tuple[Capacity | None, ...]
    problems: dict[str, int]
    between_starts: float | None

    @property
    def streams(self) -> int | None:
        found = [c.streams for c in self.capacities if c is not None]
        return min(found, default=None)


def report(record: Record) -> Report:
    """Everything that can be said about a record."""
    levels: dict[int, list[Block]] = {}
    for block in record.blocks:
        levels.setdefault(block.ask.streams, []).append(block)
    kept = [sample for samples in record.samples.values() for sample in samples]
    is_search = record.stamp.kind == "capacity"
    return Report(
        lines=tuple(filter(None, (_line(record, levels[n]) for n in sorted(levels)))),
        capacities=tuple(replay(record, s) for s in record.starts) if is_search else (),
        problems=problems(kept),
        between_starts=_between_starts(record, levels),
    )


def _line(record: Record, blocks: Sequence[Block]) -> Line | None:
    speeds = [speed for block in blocks for speed in record.speeds(block)]
    if not speeds:
        return None
    counted = [s for b in blocks for s in record.samples[b.start, b.number] if s.role == "counted"]
    first = [s.first_token for s in counted if s.first_token is not None]
    grown = _sum(blocks)
    tokens = sum(s.output_tokens or 0 for b in blocks for s in record.samples[b.start, b.number])
    return Line(
        streams=blocks[0].ask.streams,
        turns=len(speeds),
        median=statistics.median(speeds),
        p5=quantile(speeds),
        p5_at_least=lower_bound(speeds, confidence=LOOK_CONFIDENCE),
        worst=min(_stream_medians(counted), default=0.0),
        first_token_p95=quantile(first, 0.95) if first else None,
        cache_hits=_share(grown, "prefix_hits", "prefix_queries"),
        cold=_share(grown, "host_picks", "picks"),
        host_bytes_per_token=grown["host_bytes"] / tokens
        if tokens and "host_bytes" in grown
        else None,
    )


def _stream_medians(counted: Sequence[Sample]) -> Iterator[float]:
    by_stream: dict[tuple[int, int, int], list[float]] = {}
    for sample in counted:
        if sample.speed is not None:
            key = (sample.start, sample.block, sample.stream)
            by_stream.setdefault(key, []).append(sample.speed)
    yield from map(statistics.median, by_stream.values())


def _sum(blocks: Sequence[Block]) -> dict[str, float]:
    """Counters over all blocks; one that any block lacks is unknown."""
    if any(block.counters is None for block in blocks):
        return {}
    found = [block.counters for block in blocks if block.counters is not None]
    names = set.intersection(*(set(counters) for counters in found))
    return {name: math.fsum(counters[name] for counters in found) for name in names}


def _share(grown: dict[str, float], part: str, whole: str) -> float | None:
    if part not in grown or not grown.get(whole):
        return None
    return grown[part] / grown[whole]


def _between_starts(record: Record, levels: dict[int, list[Block]]) -> float | None:
    """Standard deviation of the medians of the starts, relative; the largest over the levels.

    None with fewer than two known starts at any one number of streams: unknown, not zero.
    """
    spreads = []
    for blocks in levels.values():
        by_start: dict[str, list[float]] = {}
        for block in blocks:
            if block.engine is not None:
                by_start.setdefault(block.engine, []).extend(record.speeds(block))
        medians = [statistics.median(speeds) for speeds in by_start.values() if speeds]
        if len(medians) >= 2:
            spreads.append(statistics.stdev(medians) / statistics.fmean(medians))
    return max(spreads, default=None)


def report_lines(record: Record) -> Iterator[str]:
    """The report for people."""
    found, goal = report(record), record.stamp.goal
    yield (
        f"{'streams':>7} {'turns':>6} {'median':>8} {'p5':>8} {'p5 >=':>8} {'worst':>8} "
        f"{'TTFT p95':>9} {'cached':>7} {'cold':>6} {'host/token':>11}"
    )
    for row in found.lines:
        yield (
            f"{row.streams:>7} {row.turns:>6} {row.median:>8.1f} {row.p5:>8.1f} "
            f"{_or(row.p5_at_least, '8.1f')} {row.worst:>8.1f} "
            f"{_or(row.first_token_p95, '7.2f')} s "
            f"{_or(row.cache_hits, '7.1%')} {_or(row.cold, '6.1%')} "
            f"{_or(row.host_bytes_per_token and row.host_bytes_per_token / 2**20, '7.1f')} MiB"
        )
    yield "speeds in tokens per second and stream; p5 >= holds at 95 %; ? could not be read"
    if record.stamp.kind == "capacity":
        yield from _answer_lines(found, goal.target, goal.headroom)
    yield from _start_lines(record, found)
    yield from problem_lines([s for samples in record.samples.values() for s in samples])


def require_speeds(record: Record, streams: Sequence[int]) -> None:
    """Raises CheckFailed where a number of streams has no turn that came and whose speed is known.

    A failed turn counts as a speed of 0 beside others; alone it says nothing.
    """
    counts = [s for kept in record.samples.values() for s in kept if s.role == "counted"]
    good = {s.streams for s in counts if s.error is None and s.speed is not None}
    missing = sorted(set(streams) - good)
    if not missing:
        return
    here = [s for s in counts if s.streams in missing]
    which = ", ".join(map(str, missing))
    why = ", ".join(f"{n:,} {name}" for name, n in problems(here).items())
    known = [s.latency for s in counts if s.latency is not None]
    fix = "look at what was counted above"
    if not here:
        why = "no turn that counts ended in time"
        fix = "more --seconds"
        if known:
            fix += f": others took {statistics.median(known):.1f} s a turn"
    elif all(s.error is None for s in here):
        fix = f"answers of {LEAST_TOKENS} tokens or more, streamed, with their usage"
    raise CheckFailed(f"nothing was measured at {which} streams: {why}", fix=fix)


def _answer_lines(found: Report, target: float, headroom: float) -> Iterator[str]:
    if found.streams is None:
        yield "the search is not finished: run the same command again to continue it"
        return
    known = [c for c in found.capacities if c is not None]
    each = ", ".join(str(c.streams) for c in known)
    more = " or more: the limit was reached" if all(c.at_limit for c in known) else ""
    hold = "holds" if found.streams == 1 and not more else "hold"
    yield (
        f"{counted(found.streams, 'stream')}{more} {hold} p5 >= {target:g} x {headroom:g} = "
        f"{target * headroom:g} tokens per second (by start: {each})"
    )
    if not all(c.sure for c in known):
        yield "not sure at 95 %: a deciding number of streams lies too near the threshold"
    for sentence in dict.fromkeys(str(u) for c in known for u in c.unsteady):
        yield f"warning: {sentence}"


def _start_lines(record: Record, found: Report) -> Iterator[str]:
    engines = {block.engine for block in record.blocks}
    if None in engines:
        yield "warning: the server does not say when it started: starts cannot be told apart"
    elif len(engines) < FEWEST_STARTS:
        yield (
            f"warning: {len(engines)} of {FEWEST_STARTS} fresh starts of the engine: "
            "restart it and run the same command again"
        )
    if found.between_starts is not None:
        yield (
            f"medians of {len(engines - {None})} starts scatter by {found.between_starts:.1%} "
            "(standard deviation, the largest over the numbers of streams)"
        )


def _or(value: float | None, form: str) -> str:
    width = int(form.split(".")[0])
    return f"{'?':>{width}}" if value is None else f"{value:>{form}}"
