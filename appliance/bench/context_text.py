"""The report of a record of contexts, for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from appliance.bench.bounds import quantile
from appliance.bench.context_report import PrefixCheck, at_lengths, beside, cached, prefix_check
from appliance.bench.record import Record
from appliance.bench.samples import problem_lines
from preflight.counted import counted


def context_lines(record: Record) -> Iterator[str]:
    """The report for people."""
    check = prefix_check(record)
    if check is not None:
        yield _prefix_line(check)
    yield f"{'context':>8} {'input':>8} {'first token':>12} {'per token':>10} {'turns':>6}"
    for row in at_lengths(record):
        yield (
            f"{row.asked_tokens:>8,} {_or(row.input_tokens, 8, ',.0f')} "
            f"{_or(row.first_token, 10, '.3f')} s {_or(_ms(row.per_token), 7, '.2f')} ms "
            f"{row.turns:>6}"
        )
    together = beside(record)
    if together is not None:
        yield f"three streams, alone: {_speeds(together.alone)}"
        yield (
            f"while a fourth reads {_or(together.read_tokens, 0, ',.0f')} tokens "
            f"({_or(together.read_seconds, 0, '.2f')} s to its first token): "
            f"{_speeds(together.during)}; longest gap {_or(together.longest_gap, 0, '.3f')} s"
        )
    for line in cached(record):
        share = "?" if line.cached_share is None else f"{line.cached_share:.1%}"
        yield (
            f"cached prefix of {_or(line.input_tokens, 0, ',.0f')} tokens, "
            f"{counted(line.users, 'user')}: first token p95 "
            f"{_or(line.first_token_p95, 0, '.3f')} s, {share} from the cache "
            f"({counted(line.turns, 'turn')})"
        )
    yield from problem_lines([s for samples in record.samples.values() for s in samples])


def _prefix_line(check: PrefixCheck) -> str:
    times = " and ".join(f"{_or(seconds, 0, '.3f')} s" for seconds in check.first_tokens)
    if check.works is None:
        return (
            "prefix caching: unknown: neither the usage nor the engine's counters say "
            f"(first token after {times})"
        )
    how = "works" if check.works else "does NOT work"
    return (
        f"prefix caching {how}: of a prompt sent twice {check.cached:,.0f} of "
        f"{_or(check.input_tokens, 0, ',.0f')} tokens came from the cache the second time, by "
        f"{check.source} (first token after {times})"
    )


def _speeds(speeds: Sequence[float]) -> str:
    if not speeds:
        return "no turn could be measured"
    return (
        f"median {statistics.median(speeds):.1f}, p5 {quantile(speeds):.1f} "
        f"({counted(len(speeds), 'turn')})"
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _or(value: float | None, width: int, form: str) -> str:
    return f"{'?' if value is None else format(value, form):>{width}}"
