"""How often the paired interval holds the true difference.

PYTHONPATH=.:tests python -m accuracy_study 10000
"""

import sys

import numpy as np

from appliance.accuracy.paired import compare

# Shares of items that only A, both or neither, only B gets right.
TRUTHS = ((0.05, 0.90, 0.05), (0.08, 0.88, 0.04), (0.03, 0.90, 0.07), (0.12, 0.80, 0.08))


def coverage(studies: int, items: int, resamples: int) -> float:
    hits = 0
    for seed in range(studies):
        truth = TRUTHS[seed % len(TRUTHS)]
        kinds = np.random.default_rng([3, seed]).choice([-1, 0, 1], items, p=truth)
        a = {str(i): float(kind != 1) for i, kind in enumerate(kinds)}
        b = {str(i): float(kind != -1) for i, kind in enumerate(kinds)}
        low, high = compare(a, b, resamples=resamples, seed=seed).interval
        hits += low - 1e-12 <= truth[2] - truth[0] <= high + 1e-12
    return hits / studies


if __name__ == "__main__":
    for count in (150, 450):
        print(f"{count} items: {coverage(int(sys.argv[1]), count, 1000):.4f}")
