"""95 % intervals of a paired difference: of right-or-wrong items, and by resampling."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

from appliance.errors import UsageError

RESAMPLES = 4000
CONFIDENCE = 0.95
Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
Group = tuple[float, int]  # sum of the differences, number of items


def bootstrap(
    sums: Sequence[Group],
    resamples: int = RESAMPLES,
    seed: int = 5,
    limits: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """95 % interval of the mean per item: percentiles of the resampled mean, widened a little.

    `sums`: of each group, the sum and the number of its items. `limits`: where an item's value is
    bounded, the interval allows for groups unlike any of these, too. Widened by sqrt(G / (G - 1)):

    A resample of G groups varies less than the true sampling by (G - 1) / G (Efron and Tibshirani
    1993, ch. 5.6): without this the interval of few groups would be too short.
    """
    count = len(sums)
    if count < 2:
        raise UsageError("all items belong to one group", fix="two or more independent groups")
    chance = random.Random(seed)
    center = sum(total for total, _ in sums) / sum(n for _, n in sums)
    if all(n == 1 for _, n in sums):
        totals = [total for total, _ in sums]
        means = sorted(math.fsum(chance.choices(totals, k=count)) / count for _ in range(resamples))
    else:
        drawn = (chance.choices(sums, k=count) for _ in range(resamples))
        means = sorted(sum(t for t, _ in rows) / sum(n for _, n in rows) for rows in drawn)
    wider = math.sqrt(count / (count - 1))
    edge = round((1 - CONFIDENCE) / 2 * resamples)
    low, high = (center + wider * (mean - center) for mean in (means[edge - 1], means[-edge]))
    return (
        (low, high) if limits is None else _allowing_for_unseen((low, high), center, count, limits)
    )


def unseen(count: int) -> float:
    """At most this share is of a kind that none of `count` independent things was (97.5 %, exact).

    Each side of a 95 % interval allows for it: what never happened in two items may well happen.
    """
    return 1.0 - math.pow((1 - CONFIDENCE) / 2, 1 / count)


def paired_interval(only_a: int, only_b: int, items: int) -> tuple[float, float]:
    """95 % interval of B minus A from the items that one of them alone got right.

    Tango's score interval (Statistics in Medicine 17, 1998), which holds where few or none differ,
    and at least as wide as the exact bound on what was not seen (`unseen`).
    """
    center = (only_b - only_a) / items
    low = -_score_bound(only_a, only_b, items)
    high = _score_bound(only_b, only_a, items)
    return _allowing_for_unseen((low, high), center, items, (-1.0, 1.0))


def _score_bound(more: int, fewer: int, items: int) -> float:
    """The largest p(more) - p(fewer) that the score test does not reject at 2.5 %."""
    low, high = (more - fewer) / items, 1.0
    for _ in range(60):  # to the last bit
        middle = (low + high) / 2
        below, above = (middle, high) if _score(more, fewer, items, middle) > -Z else (low, middle)
        low, high = below, above
    return high


def _score(more: int, fewer: int, items: int, delta: float) -> float:
    """Standardised distance of the observed difference from `delta`, as if `delta` were true."""
    # The likeliest share of `fewer` given delta: a root of a x^2 + b x + c (Tango, equation 11).
    a = 2.0 * items
    b = (2.0 * items - more + fewer) * delta - more - fewer
    c = -fewer * delta * (1.0 - delta)
    likeliest = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = items * (2 * likeliest + delta * (1.0 - delta))
    gap = more - fewer - items * delta
    return gap / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, gap)


def _allowing_for_unseen(
    interval: tuple[float, float], center: float, count: int, limits: tuple[float, float]
) -> tuple[float, float]:
    share, (least, most) = unseen(count), limits
    low = min(interval[0], center - share * (center - least))
    high = max(interval[1], center + share * (most - center))
    return max(low, least), min(high, most)
