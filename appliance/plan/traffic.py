"""Routed rows to replay: seeded draws from counts, in any mix of topics, or a recorded trace."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice

from appliance.errors import UsageError
from appliance.plan.routing import Heat

Row = tuple[int, ...]  # the distinct experts one row picked in one layer


def draw_rows(
    counts: Sequence[float], top_k: int, seed: str, stickiness: float = 0.0
) -> Iterator[Row]:
    """Endless rows of `top_k` distinct experts, drawn one after another without replacement.

    stickiness: probability that a pick of the row before is kept; 0 draws independent rows.
    """
    if sum(c > 0 for c in counts) < top_k:
        raise UsageError(f"fewer than {top_k} experts were ever picked: no row can be drawn")
    rng = random.Random(seed)
    cumulative = list(accumulate(counts))
    total, last = cumulative[-1], len(cumulative) - 1
    row: list[int] = []
    while True:
        row = [e for e in row if rng.random() < stickiness] if stickiness else []
        while len(row) < top_k:
            expert = min(bisect_right(cumulative, rng.random() * total), last)
            if expert not in row:
                row.append(expert)
        yield tuple(row)


def interleave(streams: Sequence[Iterator[Row]]) -> Iterator[Row]:
    """One row of each stream in turn: what a step of as many rows sees."""
    while True:
        for stream in streams:
            yield next(stream)


def topic_rows(
    topics: Sequence[Heat], layer: int, top_k: int, rows: int, seed: str, stickiness: float = 0.0
) -> Iterator[Row]:
    """Rows of one layer for steps of `rows` streams, which take their topics in turn."""
    streams = []
    for number in range(max(rows, len(topics))):
        counts = topics[number % len(topics)].of(layer)
        if counts is None:
            raise UsageError(f"nothing is known about layer {layer}: it cannot be replayed")
        streams.append(draw_rows(counts, top_k, f"{seed}/{layer}/{number}", stickiness))
    return interleave(streams)


def switch(first: Iterator[Row], rows: int, then: Iterator[Row]) -> Iterator[Row]:
    """`rows` rows of one traffic, then another for good: the topic changes."""
    return chain(islice(first, rows), then)


def distinct_touched(rows: Sequence[Row]) -> int:
    """How many experts a step of these rows reads."""
    return len({expert for row in rows for expert in row})
