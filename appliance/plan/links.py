"""How many experts each card leaves on the host where links are unequal: all are ready at once.

A step waits for the slowest card. Experts go to the host from the coldest up, so twice the experts
are more than twice the bytes: it is the time of reading them that is divided, not their number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from appliance.plan.placement import LayerDemand, by_gain


def seconds_by_count(layers: Sequence[LayerDemand], rate: float, slots: int) -> list[float]:
    """Seconds of a step that one card reads from its host with 0, 1, 2, ... of its experts there.

    `rate`: bytes a second of its link; `slots`: of each layer, the hottest on the host are in them.
    """
    order = list(by_gain(layers))
    reads = [sorted(layer.heat, reverse=True) for layer in layers]
    resident = [len(row) for row in reads]
    out = [0.0]
    for position in reversed(order):
        resident[position] -= 1
        first_read = resident[position] + slots
        row, block = reads[position], layers[position].block_bytes
        more = row[first_read] * block / rate if first_read < len(row) else 0.0
        out.append(out[-1] + more)
    return out


def divide(total: int, seconds: Sequence[Sequence[float]]) -> list[int]:
    """`total` experts over cards, so that the longest of their `seconds` is as short as can be."""
    edges = sorted({value for row in seconds for value in row})
    low, high = 0, len(edges) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(bisect_right(row, edges[middle]) - 1 for row in seconds) >= total:
            high = middle
        else:
            low = middle + 1
    counts = [bisect_right(row, edges[low]) - 1 for row in seconds]
    for _ in range(sum(counts) - total):  # the last step may have been one too many for several
        slowest = max(range(len(counts)), key=lambda i: (seconds[i][counts[i]], counts[i]))
        counts[slowest] -= 1
    return counts
