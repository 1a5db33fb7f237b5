"""How p5 (and the median) of B stands to A's, with a bootstrap interval: no shape assumed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.bench.bounds import P5, quantile

RESAMPLES = 1000
CONFIDENCE = 0.95
SLOWEST = 1e-3  # tokens per second: stands for a turn that failed


@dataclass(frozen=True)
class Ratio:
    """`value` is B / A; `interval` holds the true ratio at the confidence asked for (95 %)."""

    value: float
    interval: tuple[float, float]

    @property
    def changed(self) -> bool:
        """The interval leaves out 1."""
        return not self.interval[0] <= 1.0 <= self.interval[1]


def quantile_ratio(
    a: Sequence[float],
    b: Sequence[float],
    share: float,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> Ratio:
    """Quantile of B over quantile of A, and the percentile bootstrap over both samples.

    The k-th smallest of n resampled values is the sorted sample at rank floor(n U), where U is the
    k-th smallest of n uniforms: Beta(k, n - k + 1). So one draw replaces a whole resample, and the
    draw between two ranks is interpolated, which takes the steps out of the interval.
    """
    chance = random.Random(5)
    left, right = (sorted(max(speed, SLOWEST) for speed in speeds) for speeds in (a, b))
    logs = sorted(
        math.log(_redraw(right, share, chance)) - math.log(_redraw(left, share, chance))
        for _ in range(resamples)
    )
    tail = max(1, round((1 - confidence) / 2 * resamples))
    interval = (math.exp(logs[tail - 1]), math.exp(logs[-tail]))
    return Ratio(quantile(right, share) / quantile(left, share), interval)


def p5_ratio(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    return quantile_ratio(a, b, P5, confidence)


def median_ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    return quantile_ratio(a, b, 0.5)


def _redraw(ordered: Sequence[float], share: float, chance: random.Random) -> float:
    n = len(ordered)
    rank = max(1, math.ceil(n * share - 1e-9))
    at = n * chance.betavariate(rank, n - rank + 1) - 0.5
    low = min(max(0, math.floor(at)), n - 1)
    high = min(low + 1, n - 1)
    part = min(max(at - low, 0.0), 1.0)
    return ordered[low] * (1 - part) + ordered[high] * part
