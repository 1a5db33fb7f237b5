"""EXL3 matrices outside the experts: read in place, made dense first, and fp16 of the same size."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from functools import partial

import torch

from expert_kernels import interface, launch, linear, ops
from expert_kernels.bench_gpu.timing import Facts, alone, of_each
from expert_kernels.synthetic import random_matrix

# Inputs, outputs of each matrix: attention's and a shared expert's of the reference model's width.
CASES = {
    "qkv": (5120, (4096, 1024, 1024)),
    "o": (4096, (5120,)),
    "gate_up": (5120, (2304, 2304)),
    "head": (5120, (32768,)),
}
ROWS = (1, 4, 8, 16, 32)
SPLITS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
L2_BYTES = 120e6  # copies of a case in one graph are more than stays in the cache


def _dense(x: torch.Tensor, matrices: list[ops.Matrix], out: torch.Tensor) -> None:
    for matrix in matrices:
        linear.dense(x, matrix, out, 0)


def measure(repeats: int) -> Iterator[Facts]:
    yield {
        "predicted": {"qkv, 1 row": "20 us in place, 59 dense", "o": "16, 32", "head": "77, 227"}
    }
    repeats = max(1, repeats // 4)
    architecture, count = interface.device_of(torch.device("cuda"))
    for name, (k, sizes) in CASES.items():
        weights, blocks = k * sum(sizes), sum(sizes) // launch.BLOCK
        copies = max(2, int(L2_BYTES // (weights * 3 / 8)) + 1)
        sets = [[random_matrix(k, n, 3.0, "mcg") for n in sizes] for _ in range(copies)]
        plain = [torch.randn(k, sum(sizes), device="cuda").half() for _ in range(2)]
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda").half()
            out = torch.empty(rows, sum(sizes), dtype=x.dtype, device="cuda")
            facts = {"case": name, "rows": rows, "weights": weights}
            usual = launch.linear(rows, k, blocks, count, architecture)
            us = of_each([partial(linear.in_place, x, m, out, 0) for m in sets], repeats)
            dense = of_each([partial(_dense, x, m, out) for m in sets[:2]], repeats)
            yield {
                **facts,
                "us": us,
                "split": usual.split,
                "dense_us": dense,
                "dense_over_in_place": dense / us,
                "fp16_us": of_each([partial(torch.mm, x, w) for w in plain], repeats),
                "weights_a_second": weights / us * 1e6,
            }
            for split in SPLITS if rows in (1, 16) else ():
                if split != usual.split and k // split >= 256:
                    chosen = dataclasses.replace(usual, split=split)
                    calls = [partial(linear.in_place, x, m, out, 0, chosen) for m in sets]
                    yield {**facts, "split": split, "us": of_each(calls, repeats)}


if __name__ == "__main__":
    sys.exit(alone(measure, "expert_kernels.bench_gpu.dense_matrices", __doc__))
