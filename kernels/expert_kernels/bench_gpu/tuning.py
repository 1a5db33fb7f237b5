"""What the launch's numbers do: they are in launch.py because of this."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator

from expert_kernels.bench_gpu.timing import CALLS, SHAPES, Facts, Problem, alone
from expert_kernels.synthetic import RandomExperts, roomy

# touched, top_k, on the host. Choices of one case are measured beside each other.
CASES = (
    *((1, 1, 1), (1, 6, 1), (6, 6, 6), (6, 6, 1), (24, 6, 1), (24, 6, 2), (36, 6, 1), (36, 6, 2)),
    *((1, 1, 0), (2, 2, 0), (6, 6, 0), (12, 6, 0), (24, 6, 0), (48, 6, 0)),
)
SPLITS = ((1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (8, 2), (8, 4))
# Where units are fewer than blocks: one for each multiprocessor may be better than a power of two.
FINE_A, FINE_B = (2, 3, 4, 5, 6, 7, 8, 10, 14, 16), (1, 2, 3, 4, 6)


def _choices(touched: int, hosts: int) -> Iterator[Facts]:
    if not hosts and touched <= 6:
        for a, b in itertools.product(FINE_A, FINE_B):
            yield {"split_a": a, "split_b": b}
        return
    for a, b in SPLITS:
        for blocks in (16, 24, 32, 48, 64, 96) if hosts else (64,):
            yield {"split_a": a, "split_b": b, "host_blocks": blocks}
    for bytes_ in (256, 384, 512, 640, 896, 1280) if hosts else ():
        yield {"link_bytes": bytes_ << 10}
    if 0 < hosts < touched:
        for percent in (60, 80, 100, 125, 150, 165, 180, 200, 300):
            yield {"link_percent": percent}


def measure(repeats: int) -> Iterator[Facts]:
    repeats = max(1, repeats // 8)
    for shape in SHAPES:
        experts = RandomExperts(48 * CALLS, shape)
        for touched, top_k, hosts in CASES:
            if shape is not SHAPES[0] and 0 < hosts < touched:
                continue  # of mixed layers the first shape's are claimed
            problem = Problem(experts, touched, top_k, hosts, repeats)
            usual = roomy(shape, top_k, max(1, touched // top_k))
            facts = {"hidden": shape.hidden, "touched": touched, "top_k": top_k, "host": hosts}
            yield {**facts, "us": problem.microseconds()}
            for choice in _choices(touched, hosts):
                us = problem.microseconds(chosen=dataclasses.replace(usual, **choice))
                yield {**facts, **choice, "us": us}


if __name__ == "__main__":
    sys.exit(alone(measure, "expert_kernels.bench_gpu.tuning", __doc__))
