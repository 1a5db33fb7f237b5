"""Host experts that are also stored in device memory, against reading them alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

from expert_kernels.bench_gpu.timing import CALLS, SHAPES, Facts, Problem, alone, memcpy_us
from expert_kernels.synthetic import RandomExperts


def measure(repeats: int) -> Iterator[Facts]:
    """A second read over the link would cost 1.0 more; the stores go to memory 90 times as fast."""
    yield {"predicted": {"over_reading_alone": 1.01}}
    shape = SHAPES[0]
    experts = RandomExperts(24, shape)
    slots = torch.empty(24, shape.block_bytes, dtype=torch.uint8, device="cuda")
    for touched in (1, 6):
        problem = Problem(experts, touched, 6, touched, repeats)
        wanted = torch.tensor([slot.data_ptr() for slot in slots], device="cuda")
        fill = torch.zeros_like(wanted)
        plain = problem.microseconds(fill=fill)
        empty = problem.microseconds(fill=fill, before=fill.zero_)
        stored = problem.microseconds(fill=fill, before=partial(fill.copy_, wanted))
        yield {
            "host": touched,
            "plain_us": plain,
            "us": stored,
            "over_reading_alone": (stored - empty + plain) / plain,
            "memcpy_us": memcpy_us(experts, touched, repeats),
            "stored": bool((fill[: touched * CALLS] < 0).all()),
        }


if __name__ == "__main__":
    sys.exit(alone(measure, "expert_kernels.bench_gpu.write_through", __doc__))
