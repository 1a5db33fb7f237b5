"""Damage that a task's score does not show: how far two systems' next tokens are apart.

Both answered the same questions greedily and listed their likeliest tokens at each position. Up to
the first position at which they chose differently, that one included, both had read the same text,
so the lists compare. What is not on both lists is put into one rest: the divergence between such
coarser distributions is never above the true one (Cover and Thomas, 2.8), so it is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.accuracy.intervals import bootstrap
from preflight.counted import counted

TOP = 20
EDGES = (0, 1, 4, 16, 64, 256)  # of the ranges of positions that are told apart
SMALLEST = 1e-12
Listed = tuple[str, Mapping[str, float]]  # the token chosen; log-probabilities of the likeliest
Tokens = Sequence[Listed]


@dataclass(frozen=True)
class Range:
    """Positions `first` and on, up to the next range."""

    first: int
    positions: int
    divergence: float
    same_top: float


@dataclass(frozen=True)
class TokenLevel:
    """`divergence`: mean of KL(A || B) in nats, at least. `same_top`: share of positions at which
    both chose the same token. Intervals: 95 %, items as groups; None with fewer than two items."""

    items: int
    positions: int
    divergence: float
    divergence_interval: tuple[float, float] | None
    same_top: float
    same_top_interval: tuple[float, float] | None
    ranges: tuple[Range, ...]


def listed(choice: Mapping[str, Any]) -> list[Listed] | None:
    """The tokens of a choice of the chat API; None: the server did not give them."""
    content = (choice.get("logprobs") or {}).get("content")
    if not content:
        return None
    return [
        (each["token"], {top["token"]: float(top["logprob"]) for top in each["top_logprobs"]})
        for each in content
    ]


def compare_tokens(a: Mapping[str, Tokens], b: Mapping[str, Tokens]) -> TokenLevel | None:
    """Over the items that both list; None: there are none."""
    items = {i: list(_comparable(a[i], b[i])) for i in sorted(set(a) & set(b))}
    items = {i: rows for i, rows in items.items() if rows}
    if not items:
        return None
    every = [row for rows in items.values() for row in rows]
    sums = [
        [(math.fsum(r[at] for r in rows), len(rows)) for rows in items.values()] for at in (1, 2)
    ]
    limits = (None, (0.0, 1.0))  # a divergence has no upper one
    intervals = [
        bootstrap(each, limits=within) if len(items) > 1 else None
        for each, within in zip(sums, limits, strict=True)
    ]
    ranges = []
    for first, end in zip(EDGES, (*EDGES[1:], math.inf), strict=True):
        here = [row for row in every if first <= row[0] < end]
        if here:
            ranges.append(Range(first, len(here), _mean(here, 1), _mean(here, 2)))
    return TokenLevel(
        len(items), len(every), _mean(every, 1), intervals[0], _mean(every, 2), intervals[1],
        tuple(ranges),
    )  # fmt: skip


def divergence(a: Mapping[str, float], b: Mapping[str, float]) -> float:
    """KL(a || b) in nats, at least; log-probabilities of the tokens that each lists."""
    both = sorted(set(a) & set(b))
    of_both = math.fsum(math.exp(a[token]) * (a[token] - b[token]) for token in both)
    rest_a, rest_b = (
        max(1.0 - math.fsum(math.exp(side[token]) for token in both), SMALLEST) for side in (a, b)
    )
    return max(0.0, of_both + rest_a * math.log(rest_a / rest_b))


def token_lines(found: TokenLevel) -> Iterator[str]:
    low, high = found.divergence_interval or (math.nan, math.nan)
    least, most = found.same_top_interval or (math.nan, math.nan)
    yield (
        f"token by token, {counted(found.positions, 'position')} of "
        f"{counted(found.items, 'item')}: divergence at least "
        f"{found.divergence:.5f} nats [{low:.5f}, {high:.5f}], the same token first at "
        f"{found.same_top:.2%} [{least:.2%}, {most:.2%}]"
    )
    for row in found.ranges:
        yield (
            f"  from position {row.first:>3}: {row.divergence:.5f} nats, {row.same_top:.2%} "
            f"({row.positions:,} positions)"
        )


def _comparable(a: Tokens, b: Tokens) -> Iterator[tuple[int, float, float]]:
    """(position, divergence, 1 where both chose the same), up to where they part."""
    for position, ((mine, tops), (other, others)) in enumerate(zip(a, b, strict=False)):
        yield position, divergence(tops, others), float(mine == other)
        if mine != other:
            return


def _mean(rows: Sequence[tuple[int, float, float]], at: int) -> float:
    return math.fsum(row[at] for row in rows) / len(rows)
