"""Whether the machine stayed the same while it was measured: drift between blocks, and noise.

Both look at blocks of the same number of streams, run at different times. Drift: the median of the
last block against the first. Noise: the medians of the blocks scatter more than their own samples
explain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from appliance.bench.level import Level
from preflight.counted import counted

SMALLEST_CHANGE = 0.03  # of the speed; less is not worth a word
Z = 3.29  # two-sided 0.1 %: a study makes several such comparisons
NOISE_FACTOR = 3.0  # variance of block medians over what the samples explain
SLOWEST = 1e-3  # tokens per second: stands for a turn that failed
FEWEST_SAMPLES = 20
FEWEST_BLOCKS = 4


@dataclass(frozen=True)
class Unsteady:
    """`change`: for drift last block / first - 1; for noise the spread of block medians."""

    kind: Literal["drift", "noise"]
    streams: int
    change: float

    def __str__(self) -> str:
        streams = counted(self.streams, "stream")
        if self.kind == "drift":
            way = "slower" if self.change < 0 else "faster"
            return f"the machine drifts: {streams} ended {abs(self.change):.1%} {way}"
        return f"the machine is noisy: at {streams} equal runs scatter by {self.change:.1%}"


def unsteadiness(levels: Iterable[Level]) -> Iterator[Unsteady]:
    for level in levels:
        blocks = [block for block in level.blocks if len(block) >= FEWEST_SAMPLES]
        if len(blocks) < 2:
            continue
        first, last = _center(blocks[0]), _center(blocks[-1])
        change = math.exp(last[0] - first[0]) - 1
        if abs(change) > SMALLEST_CHANGE and abs(last[0] - first[0]) > Z * math.hypot(
            first[1], last[1]
        ):
            yield Unsteady("drift", level.streams, change)
        elif len(blocks) >= FEWEST_BLOCKS:
            centers = [_center(block) for block in blocks]
            spread = statistics.stdev(center for center, _ in centers)
            explained = math.sqrt(statistics.fmean(error**2 for _, error in centers))
            if spread > SMALLEST_CHANGE and spread**2 > NOISE_FACTOR * explained**2:
                yield Unsteady("noise", level.streams, spread)


def _center(speeds: Sequence[float]) -> tuple[float, float]:
    """The median of the logarithms and its standard error, from ranks: no shape assumed."""
    logs = sorted(math.log(max(speed, SLOWEST)) for speed in speeds)
    n = len(logs)
    half = math.sqrt(n) / 2  # one standard deviation of the rank of the median
    low, high = max(0, round(n / 2 - half) - 1), min(n - 1, round(n / 2 + half))
    return statistics.median(logs), max((logs[high] - logs[low]) / 2, 1e-9)
