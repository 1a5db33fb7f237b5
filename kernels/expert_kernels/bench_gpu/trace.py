"""What a call over a few experts does when: where the time beside the link's goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from expert_kernels import cuda
from expert_kernels.bench_gpu.timing import CALLS, SHAPES, Facts, Problem, alone, captured
from expert_kernels.synthetic import RandomExperts, roomy

RECORDS = 64  # of a block: csrc/experts.h, EXPERTS_TRACE
BEGAN, ROUTED, ASKED, READY, WALKED, DONE, LEFT = range(1, 8)


def measure(repeats: int) -> Iterator[Facts]:
    """Microseconds from the end of the call before; a block is a row. Of four in a graph the third.

    A stamp costs a block some 20 ns; globaltimer may go on in steps of 32 ns or of 1 us.
    """
    for shape in SHAPES:
        experts = RandomExperts(6 * CALLS, shape)
        for touched, top_k, hosts in ((1, 1, 1), (1, 6, 1), (6, 6, 6), (1, 1, 0), (2, 2, 0)):
            usual = roomy(shape, top_k)
            problem = Problem(experts, touched, top_k, hosts, repeats)
            facts: Facts = {"hidden": shape.hidden, "touched": touched, "top_k": top_k}
            facts |= {"host": hosts, "us": problem.microseconds()}
            shown = usual.host_blocks if hosts else usual.blocks
            yield {**facts, **_traced(problem, usual.blocks, shown)}


def _traced(problem: Problem, blocks: int, shown: int, **options: Any) -> Facts:
    traces = torch.zeros(CALLS, blocks, RECORDS, 3, dtype=torch.int64, device="cuda")

    def calls() -> None:
        for (weights, ids), trace in zip(problem.sets, traces, strict=True):
            cuda.decode(problem.x, weights, ids, problem.table, trace=trace, **options)

    graph = captured(calls)
    for _ in range(3):
        traces.zero_()
        graph.replay()
    torch.cuda.synchronize()
    before, mine = traces[1].tolist(), traces[2].tolist()
    start = max(row[0] for block in before for row in block)
    rows = [
        [
            (what >> 32, what & 0xFFFFFFFF, round((at - start) / 1e3, 2))
            for at, _, what in block
            if at
        ]
        for block in mine
    ]
    return {
        "clocks_a_ns": _clocks(mine[0]),
        "when": _summary(rows, shown),
        "blocks": rows[:shown],
    }


def _clocks(block: list[list[int]]) -> float:
    used = [row for row in block if row[0]]
    return (used[-1][1] - used[0][1]) / max(1, used[-1][0] - used[0][0])


def _summary(rows: list[list[tuple[int, int, float]]], shown: int) -> Facts:
    """First, median and last block at what it did first, and when the last unit was done."""
    out: Facts = {}
    names = {BEGAN: "began", ROUTED: "routed", ASKED: "asked", READY: "inputs", LEFT: "left"}
    for what, name in names.items():
        firsts = sorted(
            next(at for kind, _, at in row if kind == what)
            for row in rows[:shown]
            if any(kind == what for kind, _, _ in row)
        )
        if firsts:
            out[name] = [firsts[0], firsts[len(firsts) // 2], firsts[-1]]
    for what, name in ((WALKED, "walked"), (DONE, "done")):
        out[f"last_{name}"] = max(at for row in rows for kind, _, at in row if kind == what)
    return out


if __name__ == "__main__":
    sys.exit(alone(measure, "expert_kernels.bench_gpu.trace", __doc__))
