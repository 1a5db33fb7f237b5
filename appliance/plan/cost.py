"""What a decode step touches and costs: probabilities of experts, not shares of picks.

A step of B rows reads each cold expert once, however many rows picked it, so what counts is the
expected number of distinct cold experts (FACTS section 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def layer_costs(
    reads: Sequence[float],
    block_bytes: int,
    rate: float,
    curve: KernelCurve,
    device_seconds: float | None = None,
) -> tuple[float, ...]:
    """Expected seconds of one layer with the 0, 1, 2, ... hottest experts on the device.

    `reads`: probability that a step reads each expert. With h of them on the host a layer takes
    max(device work, start + h x block / rate). Experts are taken as independent, and h's
    distribution is exact as far as device work can hide it. `device_seconds`: the device's work
    where it is not that of these experts alone.
    """
    device = device_seconds
    if device is None:
        device = curve.device_seconds(sum(reads) * block_bytes)
    each, start = block_bytes / rate, curve.host_start_seconds
    # Up to this many host experts hide under the device's work.
    hidden = max(0, math.floor((device - start) / each))
    few = [1.0, *[0.0] * hidden]  # P(h = 0), P(h = 1), ... P(h = hidden)
    expected = 0.0
    costs = [device]
    for read in sorted(reads):  # the coldest leaves the device first
        expected += read
        for h in range(hidden, 0, -1):
            few[h] += read * (few[h - 1] - few[h])
        few[0] *= 1.0 - read
        saved = sum(p * (device - start - h * each) for h, p in enumerate(few))
        costs.append(start + expected * each + saved)
    return tuple(reversed(costs))


def gains(costs: Sequence[float]) -> tuple[float, ...]:
    """Seconds that the first, second, ... expert on the device saves; never rising."""
    out: list[float] = []
    for before, after in pairwise(costs):
        gain = max(0.0, before - after)
        out.append(min(gain, out[-1]) if out else gain)
    return tuple(out)
