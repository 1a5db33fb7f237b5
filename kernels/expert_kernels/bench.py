"""Seconds and bytes of an op on this machine: `python -m expert_kernels.bench decode`.

One core, CPU time of this process (so neighbours on the machine do not count), the median and the
best of the repeats. The ceiling is a plain copy that moves as many bytes, in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from expert_kernels import codec, reference


@dataclass(frozen=True)
class Problem:
    """One matrix of random bits, which is a valid trellis."""

    k: int = 5120
    n: int = 2304
    bits: float = 3.0
    codebook: str = "mcg"

    def trellis(self) -> torch.Tensor:
        shape = (self.k // 16, self.n // 16, int(16 * self.bits))
        generator = torch.Generator().manual_seed(0)
        return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)


def _decode(problem: Problem) -> Callable[[], torch.Tensor]:
    trellis = problem.trellis()
    return lambda: codec.decode_trellis(trellis, problem.codebook)


def _dequantise(problem: Problem) -> Callable[[], torch.Tensor]:
    trellis, suh, svh = problem.trellis(), torch.ones(problem.k), torch.ones(problem.n)
    return lambda: reference.dequantise(trellis, suh, svh, problem.codebook)


OPS: dict[str, Callable[[Problem], Callable[[], torch.Tensor]]] = {
    "decode": _decode,
    "dequantise": _dequantise,
}


def cpu_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """CPU seconds of each of `repeats` calls on one core, after one that fills the caches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        call()
        out = []
        for _ in range(repeats):
            start = time.process_time()
            call()
            out.append(time.process_time() - start)
        return out
    finally:
        torch.set_num_threads(threads)


def report(op: str, problem: Problem, repeats: int) -> str:
    """One line of text: the op, its seconds, the bytes it moves and its share of a copy's rate."""
    call = OPS[op](problem)
    result = call()
    moved = int(problem.k * problem.n * problem.bits) // 8 + result.nbytes
    source, target = (torch.ones(moved // 2, dtype=torch.uint8) for _ in range(2))
    seconds = cpu_seconds(call, repeats)
    copy = cpu_seconds(lambda: target.copy_(source), repeats)
    median = statistics.median(seconds)
    return (
        f"{op} {problem.k}x{problem.n} K={problem.bits:g} {problem.codebook}: "
        f"median {median:.6f} s, best {min(seconds):.6f} s of {repeats}; "
        f"{moved / 1e6:.1f} MB moved, {moved / median / 1e9:.2f} GB/s, "
        f"{statistics.median(copy) / median:.3f} of a copy's rate"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m expert_kernels.bench", description=__doc__)
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--k", type=int, default=Problem.k, help="inputs (default %(default)s)")
    parser.add_argument("--n", type=int, default=Problem.n, help="outputs (default %(default)s)")
    parser.add_argument("--bits", type=float, default=Problem.bits)
    parser.add_argument("--codebook", choices=codec.CODEBOOKS, default=Problem.codebook)
    parser.add_argument("--repeats", type=int, default=9)
    a = parser.parse_args(argv)
    sys.stdout.write(report(a.op, Problem(a.k, a.n, a.bits, a.codebook), a.repeats) + "\n")


if __name__ == "__main__":
    main()
