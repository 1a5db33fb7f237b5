"""How often the capacity search is right, and what it costs, on machines with known truth.

PYTHONPATH=.:tests python -m bench_study capacity 1000
PYTHONPATH=.:tests python -m bench_study capacity 1000 5000      # other seeds
PYTHONPATH=.:tests python -m bench_study bounds 10000
"""

import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from bench_simulator import NOISES, draw, drive, machine, true_p5

from appliance.bench.bounds import lower_bound
from appliance.bench.capacity import linear_sweep, search
from appliance.bench.level import LOOKS
from appliance.bench.ratio import p5_ratio


@dataclass
class Cost:
    """Requests per run of the search, over those of two sweeps: 1, 2, 3, ... streams.

    `fixed`: every number of streams gets the longest run. `early`: each stops as soon as it is
    sure, by the very rule that the search uses.
    """

    fixed: list[float] = field(default_factory=list)
    early: list[float] = field(default_factory=list)


@dataclass
class Study:
    runs: int = 0
    wrong: list[tuple[int, int, int]] = field(default_factory=list)  # seed, truth, found
    small: Cost = field(default_factory=Cost)  # truth below 32 streams
    large: Cost = field(default_factory=Cost)
    requests: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def worst_mean_ratio(self) -> float:
        """Over truths: mean requests of the search / those of the sweep that stops early."""
        return max(
            sum(ours for ours, _ in pairs) / sum(plain for _, plain in pairs)
            for pairs in self.requests.values()
        )


def study_capacity(runs: int, least_truth: int = 0, first_seed: int = 0) -> Study:
    found = Study()
    for seed in range(first_seed, first_seed + runs):
        ours, plain = machine(seed, least_truth), machine(seed, least_truth)
        capacity = drive(search(ours.goal), ours.run)
        drive(linear_sweep(plain.goal), plain.run)
        found.runs += 1
        if capacity.streams != ours.truth:
            found.wrong.append((seed, ours.truth, capacity.streams))
        cost = found.large if ours.truth >= 32 else found.small
        fixed = sum(LOOKS[-1] + n for n in range(1, ours.truth + 2))
        cost.fixed.append(ours.requests / fixed)
        cost.early.append(ours.requests / plain.requests)
        found.requests[ours.truth].append((ours.requests, plain.requests))
    return found


def coverage_of_bound(studies: int, turns: int) -> float:
    """How often the 95 % lower bound on p5 lies at or below the truth, over noises in turn."""
    hits = 0
    for seed in range(studies):
        noise = NOISES[seed % len(NOISES)]
        sample = draw(noise, turns, turns, np.random.default_rng([1, seed]))
        low = lower_bound(sample.tolist())
        hits += low is not None and low <= true_p5(noise)
    return hits / studies


def coverage_of_ratio(studies: int, turns: int) -> float:
    """How often the 95 % bootstrap interval of p5(B) / p5(A) holds the true ratio, 1.10."""
    hits = 0
    for seed in range(studies):
        noise, chance = NOISES[seed % len(NOISES)], np.random.default_rng([2, seed])
        a, b = draw(noise, turns, turns, chance), draw(noise, turns, turns, chance) * 1.10
        low, high = p5_ratio(a.tolist(), b.tolist()).interval
        hits += low <= 1.10 <= high
    return hits / studies


def main(what: str, count: int, first_seed: int = 0) -> None:
    began = time.process_time()
    if what == "capacity":
        study = study_capacity(count, first_seed=first_seed)
        print(f"{count - len(study.wrong)} of {study.runs} right; wrong (seed, truth, found):")
        print(f"  {study.wrong}")
        for name, cost in (("N < 32", study.small), ("N >= 32", study.large)):
            for against in ("fixed", "early"):
                ratios = sorted(getattr(cost, against))
                shares = [ratios[int(part * len(ratios))] for part in (0.5, 0.95, 0.99)]
                p50, p95, p99 = (f"{share:.3f}" for share in shares)
                print(
                    f"{name}, requests over the {against} sweep's, {len(ratios)} runs: mean "
                    f"{statistics.fmean(ratios):.3f}, p50 {p50}, p95 {p95}, p99 {p99}, "
                    f"most {ratios[-1]:.3f}"
                )
        print(f"worst mean over a truth, early sweep: {study.worst_mean_ratio():.3f}")
    else:
        for turns in (60, 120, 400):
            print(f"bound on p5, {turns} turns: {coverage_of_bound(count, turns):.4f}")
        for turns in (200, 400):
            print(f"bootstrap of the ratio of p5, {turns} turns: {coverage_of_ratio(count, turns)}")
    print(f"{time.process_time() - began:.1f} s of CPU")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
