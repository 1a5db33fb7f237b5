"""What a decode step touches and moves: probabilities of experts, not shares of picks.

A step of B rows reads each cold expert once, however many rows picked it, so what counts is the
expected number of distinct cold experts (FACTS section 3).
"""

from __future__ import annotations

from collections.abc import Sequence


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
