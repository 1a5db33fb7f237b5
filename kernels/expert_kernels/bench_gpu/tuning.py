"""What the launch's numbers do: they are in launch.py because of this."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

import torch

from expert_kernels import launch
from expert_kernels.bench_gpu.timing import CALLS, SHAPES, Facts, Problem, alone
from expert_kernels.synthetic import RandomExperts

TOUCHED_TOP_K_HOST = (
    *((1, 1, 1), (1, 6, 1), (6, 6, 6), (6, 6, 0), (6, 6, 1), (6, 6, 2)),
    *((24, 6, 1), (24, 6, 2), (36, 6, 0), (36, 6, 2), (36, 6, 3)),
)


def measure(repeats: int) -> Iterator[Facts]:
    shape, repeats = SHAPES[0], max(1, repeats // 4)
    experts = RandomExperts(36 * CALLS, shape)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    for touched, top_k, hosts in TOUCHED_TOP_K_HOST:
        problem = Problem(experts, touched, top_k, hosts, repeats)
        usual = launch.decode(
            max(1, touched // top_k), shape.hidden, shape.intermediate, count, top_k=top_k
        )
        facts = {"touched": touched, "top_k": top_k, "host": hosts}
        yield {**facts, "us": problem.microseconds()}
        for overlap in (0, 3):
            yield {**facts, "overlap": overlap, "us": problem.microseconds(overlap=overlap)}
        changes: list[Facts] = [
            *({"host_blocks": n} for n in (32, 48, 72, 96, 132) if hosts),
            *({"link_blocks": n} for n in (8, 12, 20, 24) if 0 < hosts < touched),
            *({"link_entries": n} for n in (0, 1 << 20) if 0 < hosts < touched),
            *({"split_a": n} for n in (1, 2, 4) if n < usual.split_a),
        ]
        for change in changes:
            us = problem.microseconds(chosen=dataclasses.replace(usual, **change))
            yield {**facts, **change, "us": us}


if __name__ == "__main__":
    sys.exit(alone(measure, "expert_kernels.bench_gpu.tuning", __doc__))
