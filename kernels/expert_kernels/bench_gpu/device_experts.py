"""A layer whose experts are all in device memory, beside exllamav3."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from expert_kernels.bench_gpu.timing import CALLS, SHAPES, Facts, Problem, alone
from expert_kernels.synthetic import RandomExperts

# FACTS section 3: `exl3_moe` on an H200, 7168 x 2048, K = 3, six experts, none on the host.
EXLLAMAV3_US = {(7168, 6): 169.0}


def measure(repeats: int) -> Iterator[Facts]:
    yield {"predicted": {"5120x2304, 6 touched": "115 us", "36 touched": "500 us"}}
    for shape in SHAPES:
        experts = RandomExperts(48 * CALLS, shape, host=False)
        for touched in (1, 6, 12, 24, 36, 48):
            us = Problem(experts, touched, min(6, touched), 0, repeats).microseconds()
            theirs = EXLLAMAV3_US.get((shape.hidden, touched))
            yield {
                "hidden": shape.hidden,
                "touched": touched,
                "us": us,
                "bytes_a_second": touched * shape.expert_bytes / us * 1e6,
                "exllamav3_us_on_such_a_card": theirs,
                "ratio": None if theirs is None else us / theirs,
            }


if __name__ == "__main__":
    sys.exit(alone(measure, "expert_kernels.bench_gpu.device_experts", __doc__))
