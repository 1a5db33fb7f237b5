"""A layer over both homes against the slower of its two parts alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from expert_kernels.bench_gpu.timing import CALLS, SHAPES, Facts, Problem, alone
from expert_kernels.synthetic import RandomExperts


def measure(repeats: int) -> Iterator[Facts]:
    yield {"predicted": {"worst ratio": 1.04}, "bar": 1.05}
    shape = SHAPES[0]
    experts = RandomExperts(36 * CALLS, shape)
    for touched in (6, 24, 36):
        for hosts in range(7):
            p = Problem(experts, touched, 6, hosts, max(1, repeats // 2))
            us = p.microseconds()
            parts = {part: p.microseconds(part) for part in ("host", "device")}
            names = {f"{part}_alone_us": value for part, value in parts.items()}
            ratio = us / max(parts.values())
            yield {"touched": touched, "host": hosts, "us": us, **names, "ratio": ratio}


if __name__ == "__main__":
    sys.exit(alone(measure, "expert_kernels.bench_gpu.mixed_layers", __doc__))
