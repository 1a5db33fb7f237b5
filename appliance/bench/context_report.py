"""What a record of contexts says. Pure: the same record, the same report."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.bench.bounds import quantile
from appliance.bench.context import STREAMS_BESIDE
from appliance.bench.record import Block, Record
from appliance.bench.samples import Sample
from appliance.errors import CheckFailed


@dataclass(frozen=True)
class PrefixCheck:
    """One prompt sent twice. `cached`: tokens of the second that came from the cache.

    `source`: who counted, the server's usage or the engine's counters; None: nobody did.
    """

    input_tokens: int | None
    cached: float | None
    source: str | None
    first_tokens: tuple[float | None, float | None]

    @property
    def works(self) -> bool | None:
        return None if self.cached is None else self.cached > 0


@dataclass(frozen=True)
class AtLength:
    """Medians over the prompts of one length; seconds. None: no answer said."""

    asked_tokens: int
    input_tokens: float | None
    first_token: float | None
    per_token: float | None
    turns: int


@dataclass(frozen=True)
class Beside:
    """Speeds of the three streams, tokens per second, without and with a read beside them.

    `longest_gap`: seconds between two pieces of any of them of which a part lay within a read.
    """

    read_tokens: float | None
    read_seconds: float | None
    alone: tuple[float, ...]
    during: tuple[float, ...]
    longest_gap: float | None


@dataclass(frozen=True)
class Cached:
    users: int
    input_tokens: float | None
    first_token_p95: float | None
    cached_share: float | None
    turns: int


def prefix_check(record: Record) -> PrefixCheck | None:
    """None: the record does not have both sends."""
    sends = [_samples(record, f"prefix {number}") for number in (1, 2)]
    if not all(sends):
        return None
    first, again = sends[0][0], sends[1][0]
    grown = _block(record, "prefix 2")
    cached: float | None = again.cached_tokens
    source = "usage" if cached is not None else None
    if cached is None and grown and grown.counters and "prefix_hits" in grown.counters:
        cached, source = grown.counters["prefix_hits"], "the engine's counters"
    return PrefixCheck(again.input_tokens, cached, source, (first.first_token, again.first_token))


def at_lengths(record: Record) -> list[AtLength]:
    assert record.stamp.lengths is not None
    return [
        AtLength(
            asked_tokens=tokens,
            input_tokens=_median(s.input_tokens for s in good),
            first_token=_median(s.first_token for s in good),
            per_token=_median(1 / s.speed if s.speed else None for s in good),
            turns=len(good),
        )
        for tokens in record.stamp.lengths.contexts
        if (good := [s for s in _samples(record, f"context {tokens}") if s.error is None])
    ]


def require_lengths(record: Record) -> None:
    """Raises CheckFailed where a length has no answer that came whole."""
    assert record.stamp.lengths is not None
    known = {row.asked_tokens for row in at_lengths(record)}
    missing = [n for n in record.stamp.lengths.contexts if n not in known]
    if missing:
        lengths = ", ".join(f"{n:,}" for n in missing)
        raise CheckFailed(
            f"nothing was measured at {lengths} tokens", fix="look at what was counted above"
        )


def beside(record: Record) -> Beside | None:
    """A turn counts as beside a read where half of its decoding or more lay within one."""
    assert record.stamp.lengths is not None
    every = [s for s in _samples(record, f"beside {record.stamp.lengths.beside}") if not s.error]
    reads = [s for s in every if s.stream == STREAMS_BESIDE and s.first_token is not None]
    if not reads:
        return None
    windows = [(s.began, s.began + (s.first_token or 0.0)) for s in reads]
    alone: list[float] = []
    during: list[float] = []
    gaps: list[float] = []
    for sample in every:
        if sample.stream == STREAMS_BESIDE or sample.speed is None or sample.first_token is None:
            continue
        start = sample.began + sample.first_token
        seconds = sum(sample.gaps)
        inside = sum(
            max(0.0, min(start + seconds, end) - max(start, begin)) for begin, end in windows
        )
        edges = [start, *(start + part for part in itertools.accumulate(sample.gaps))]
        gaps += [
            b - a
            for a, b in itertools.pairwise(edges)
            if any(a < end and b > begin for begin, end in windows)
        ]
        if inside >= seconds / 2:
            during.append(sample.speed)
        elif inside == 0:
            alone.append(sample.speed)
    return Beside(
        _median(s.input_tokens for s in reads),
        _median(s.first_token for s in reads),
        tuple(alone),
        tuple(during),
        max(gaps, default=None),
    )


def cached(record: Record) -> list[Cached]:
    lengths = record.stamp.lengths
    assert lengths is not None
    found = []
    for users in lengths.users:
        good = [s for s in _samples(record, f"cached {lengths.prefix} {users}") if not s.error]
        first = [s.first_token for s in good if s.first_token is not None]
        if first:
            shares = [
                s.cached_tokens / s.input_tokens
                for s in good
                if s.cached_tokens is not None and s.input_tokens
            ]
            found.append(
                Cached(
                    users,
                    _median(s.input_tokens for s in good),
                    quantile(first, 0.95),
                    statistics.fmean(shares) if shares else _counted(record, lengths.prefix, users),
                    len(good),
                )
            )
    return found


def _counted(record: Record, prefix: int, users: int) -> float | None:
    block = _block(record, f"cached {prefix} {users}")
    grown = block.counters if block else None
    if not grown or not grown.get("prefix_queries") or "prefix_hits" not in grown:
        return None
    return grown["prefix_hits"] / grown["prefix_queries"]


def _block(record: Record, part: str) -> Block | None:
    return next((block for block in record.blocks if block.part == part), None)


def _samples(record: Record, part: str) -> list[Sample]:
    block = _block(record, part)
    return record.samples[block.start, block.number] if block else []


def _median(values: Iterator[float | None] | Iterator[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
