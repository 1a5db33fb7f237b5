"""What a decode step touches and costs: probabilities of experts, not shares of picks.

A step of B rows reads each cold expert once, however many rows picked it, so what counts is the
expected number of distinct cold experts (FACTS section 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from appliance.plan.kernel_curve import KernelCurve


def row_probabilities(
    counts: Sequence[float] | None, experts: int, top_k: int
) -> tuple[float, ...]:
    """For each expert the probability that one row picks it; they add up to top_k.

    A row picks distinct experts, so no probability passes 1: what an expert hotter than that has
    too much goes to the others in proportion. Without counts every expert is equally likely.
    """
    if counts is None or not any(counts):
        return (min(1.0, top_k / experts),) * experts
    picked = [False] * experts
    while True:
        certain = sum(picked)
        rest = sum(c for c, sure in zip(counts, picked, strict=True) if not sure)
        scale = (top_k - certain) / rest if rest > 0 else 0.0
        over = [i for i, c in enumerate(counts) if not picked[i] and c * scale > 1.0]
        if not over or certain + len(over) >= top_k:
            break
        for i in over:
            picked[i] = True
    return tuple(
        1.0 if sure else min(1.0, c * scale) for c, sure in zip(counts, picked, strict=True)
    )


def touched(probability: float, rows: int) -> float:
    """Probability that at least one of `rows` independent rows picks this expert."""
    return 1.0 - (1.0 - probability) ** rows


@lru_cache(maxsize=1024)
def layer_costs(
    reads: tuple[float, ...], block_bytes: int, rate: float, curve: KernelCurve
) -> tuple[float, ...]:
    """Expected seconds of one layer with the 0, 1, 2, ... hottest experts on the device.

    `reads`: probability that a step reads each expert. Kept, because layers about which nothing
    is known are all alike.
    """
    device = curve.device_seconds(sum(reads) * block_bytes)
    each, start = block_bytes / rate, curve.host_start_seconds
    cold = [
        start + expected * each + _saved(few, device - start, each)
        for expected, few in _cold_counts(sorted(reads), _hidden(device - start, each, len(reads)))
    ]
    return (*reversed(cold), device)


@lru_cache(maxsize=4096)
def cold_layer_seconds(
    reads: tuple[float, ...], block_bytes: int, rate: float, curve: KernelCurve, device: float
) -> float:
    """Expected seconds of one layer whose experts on the host are read with these probabilities,
    beside `device` seconds of work on the device."""
    each, start = block_bytes / rate, curve.host_start_seconds
    seconds = device
    for expected, few in _cold_counts(reads, _hidden(device - start, each, len(reads))):
        seconds = start + expected * each + _saved(few, device - start, each)
    return seconds


def _cold_counts(reads: Iterable[float], hidden: int) -> Iterator[tuple[float, list[float]]]:
    """Expert after expert leaves the device: the expected number h that a step reads from the
    host, and the exact P(h = 0), ... P(h = hidden), experts taken as independent."""
    few = [1.0, *[0.0] * hidden]
    expected = 0.0
    for read in reads:
        expected += read
        for h in range(hidden, 0, -1):
            few[h] += read * (few[h - 1] - few[h])
        few[0] *= 1.0 - read
        yield expected, few


def _hidden(slack: float, each: float, most: int) -> int:
    """With h experts on the host a layer takes max(device work, start + h x block / rate): up to
    this many of `most` hide under the device's work."""
    return min(most, max(0, math.floor(slack / each)))


def _saved(few: Sequence[float], slack: float, each: float) -> float:
    """What the straight line start + h x each lacks where device work takes longer."""
    return sum(p * (slack - h * each) for h, p in enumerate(few))


def gains(costs: Sequence[float]) -> tuple[float, ...]:
    """Seconds that the first, second, ... expert on the device saves; never rising."""
    out: list[float] = []
    for before, after in pairwise(costs):
        gain = max(0.0, before - after)
        out.append(min(gain, out[-1]) if out else gain)
    return tuple(out)
