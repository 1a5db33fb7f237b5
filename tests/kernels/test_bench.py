"""The reference is fast enough to be the CPU engine's kernel, and the bench says how fast."""

import re

import pytest
import torch

from expert_kernels import bench

pytestmark = pytest.mark.engine


def test_a_large_expert_matrix_decodes_in_under_two_seconds_of_one_core() -> None:
    """CPU time, so a busy machine does not fail it; the figure is in docs/measurements."""
    call = bench.OPS["decode"](bench.Problem(k=5120, n=2304, bits=3.0))
    assert call().shape == (5120, 2304)
    assert min(bench.cpu_seconds(call, repeats=3)) < 2


def test_timing_leaves_the_number_of_threads_as_it_was() -> None:
    threads = torch.get_num_threads()
    seen: list[int] = []
    bench.cpu_seconds(lambda: seen.append(torch.get_num_threads()), repeats=2)
    assert seen == [1, 1, 1]
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("op", sorted(bench.OPS))
def test_the_bench_prints_one_line_with_seconds_and_bytes(
    op: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.main([op, "--k", "128", "--n", "256", "--bits", "2.5", "--codebook", "mul1"])
    line = capsys.readouterr().out
    moved = 128 * 256 * (2.5 / 8 + {"decode": 2, "dequantise": 4}[op]) / 1e6
    assert line.startswith(f"{op} 128x256 K=2.5 mul1: median 0.")
    assert re.search(rf"{moved:.1f} MB moved, [\d.]+ GB/s, [\d.]+ of a copy's rate\n$", line)
