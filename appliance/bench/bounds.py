"""Bounds on a quantile that hold whatever the distribution: counts and ranks, no model of speed.

The k-th smallest of n independent samples lies at or below the quantile of share p exactly when at
least k samples do, which has probability P(Binomial(n, p) >= k). So a rank with a probability of
at least the confidence is a lower bound (David and Nagaraja, Order Statistics, 7.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

P5 = 0.05


def quantile(values: Sequence[float], share: float = P5) -> float:
    """The ceil(n x share)-th smallest: always a value that was measured. Needs one or more."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(len(ordered) * share - 1e-9)) - 1]


@lru_cache(maxsize=65536)
def lower_rank(n: int, share: float = P5, confidence: float = 0.95) -> int | None:
    """The largest k whose k-th smallest sample is a lower bound; None: n is too small.

    For p5 at 95 % that needs 59 samples, and then it is the smallest of them.
    """
    below, rank = 0.0, 0  # P(fewer than `rank` samples lie at or below the quantile)
    while rank < n:
        below += _mass(rank, n, share)
        if below > 1.0 - confidence:
            break
        rank += 1
    return rank or None


@lru_cache(maxsize=65536)
def upper_rank(n: int, share: float = P5, confidence: float = 0.95) -> int | None:
    """The smallest k whose k-th smallest sample is an upper bound; None: n is too small."""
    below = 0.0
    for rank in range(1, n + 1):
        below += _mass(rank - 1, n, share)
        if below >= confidence:
            return rank
    return None


def lower_bound(
    values: Sequence[float], share: float = P5, confidence: float = 0.95
) -> float | None:
    """What the quantile is at least, at this confidence; None: too few samples to say."""
    rank = lower_rank(len(values), share, confidence)
    return None if rank is None else sorted(values)[rank - 1]


def upper_bound(
    values: Sequence[float], share: float = P5, confidence: float = 0.95
) -> float | None:
    """What the quantile is at most, at this confidence; None: too few samples to say."""
    rank = upper_rank(len(values), share, confidence)
    return None if rank is None else sorted(values)[rank - 1]


def _mass(k: int, n: int, p: float) -> float:
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))
