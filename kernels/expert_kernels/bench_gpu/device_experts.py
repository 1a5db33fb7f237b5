"""A layer whose experts are all in device memory, beside exllamav3."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from expert_kernels.bench_gpu.timing import CALLS, SHAPES, Facts, Problem, alone
from expert_kernels.synthetic import RandomExperts

# Its best kernel (`exl3_moe_coop`) on another H200, 7168 x 2048, K = 3, codebook mul1 where ours is
# mcg, none on the host, by experts touched: the recorded machine's run3_b3_decode.jsonl. In one
# run, and either codebook: beside_exllamav3.
EXLLAMAV3_US = {1: 46.3, 2: 65.2, 6: 162.1, 8: 174.6, 12: 267.8, 24: 481.1, 48: 930.1}


def measure(repeats: int) -> Iterator[Facts]:
    yield {"predicted": {"5120x2304 us": {1: 34, 6: 95, 24: 275, 36: 403}, "7168x2048": {24: 335}}}
    for shape in SHAPES:
        experts = RandomExperts(48 * CALLS, shape, host=False)
        for touched in (1, 2, 6, 8, 12, 24, 36, 48):
            top_k = touched if touched < 12 else 6
            us = Problem(experts, touched, top_k, 0, repeats).microseconds()
            theirs = EXLLAMAV3_US.get(touched) if shape.hidden == 7168 else None
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
