"""What the launch's numbers do: they are in launch.py because of this."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

from expert_kernels.bench_gpu.timing import CALLS, SHAPES, Facts, Problem, alone
from expert_kernels.synthetic import RandomExperts, roomy

# touched, top_k, on the host
LINK = ((1, 1, 1), (1, 6, 1), (6, 6, 6), (6, 6, 1), (6, 6, 2), (24, 6, 1), (24, 6, 2), (36, 6, 2))
SPLITS = ((1, 1, 0), (2, 2, 0), (6, 6, 0), (8, 8, 0), (12, 6, 0), (36, 6, 0), (1, 1, 1), (6, 6, 6))


def _changes(touched: int, hosts: int) -> list[Facts]:
    return [
        {"overlap": 0},
        {"overlap": 3},
        *({"host_blocks": n} for n in (32, 40, 48, 72, 96, 132)),
        *({"link_blocks": n} for n in (8, 12, 20, 24) if hosts < touched),
        *({"link_entries": n} for n in (0, 1 << 20) if hosts < touched),
    ]


def _splits(hosts: int) -> list[Facts]:
    both = [(a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4)]
    return [{"split_a": a, "split_b": b} for a, b in both if not hosts or b < 4]


def measure(repeats: int) -> Iterator[Facts]:
    repeats = max(1, repeats // 5)
    for shape in SHAPES:
        experts = RandomExperts(36 * CALLS, shape)
        for cases, changes in ((LINK, _changes), (SPLITS, lambda _, hosts: _splits(hosts))):
            if cases is LINK and shape is not SHAPES[0]:
                continue
            for touched, top_k, hosts in cases:
                problem = Problem(experts, touched, top_k, hosts, repeats)
                usual = roomy(shape, top_k)
                facts = {"hidden": shape.hidden, "touched": touched, "top_k": top_k, "host": hosts}
                yield {**facts, "us": problem.microseconds()}
                for change in changes(touched, hosts):
                    fields = {k: v for k, v in change.items() if k != "overlap"}
                    us = problem.microseconds(
                        chosen=dataclasses.replace(usual, **fields),
                        overlap=change.get("overlap", 1),
                    )
                    yield {**facts, **change, "us": us}


if __name__ == "__main__":
    sys.exit(alone(measure, "expert_kernels.bench_gpu.tuning", __doc__))
