"""Host experts alone, as a share of one pinned copy of the same bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from expert_kernels.bench_gpu.timing import SHAPES, Facts, Problem, alone, memcpy_us
from expert_kernels.synthetic import RandomExperts


def measure(repeats: int) -> Iterator[Facts]:
    """Zero-copy reads can reach 0.925 to 0.93 of the copy at most (FACTS section 3)."""
    yield {"predicted": {"1 host expert": 0.90, "6 host experts": 0.921}, "bar": [0.90, 0.92]}
    for shape in SHAPES:
        experts = RandomExperts(24, shape)
        for touched, top_k in ((1, 1), (1, 6), (6, 6)):
            problem = Problem(experts, touched, top_k, touched, repeats)
            us, copy = problem.microseconds(), memcpy_us(experts, touched, repeats)
            yield {
                "hidden": shape.hidden,
                "host": touched,
                "top_k": top_k,
                "us": us,
                "memcpy_us": copy,
                "share_of_memcpy": copy / us,
            }


if __name__ == "__main__":
    sys.exit(alone(measure, "expert_kernels.bench_gpu.host_experts", __doc__))
