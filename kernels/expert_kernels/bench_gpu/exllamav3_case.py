"""One row of the comparison with exllamav3: experts, inputs, graphs, and what is said of them."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expert_kernels import cuda
from expert_kernels.bench_gpu.exllamav3_layer import Layer, Picks
from expert_kernels.bench_gpu.timing import CALLS, Facts, captured
from expert_kernels.synthetic import RandomExperts, Shape, routing

# exllamav3's own settings, which it reads once a process: narrow blocks of exl3_moe_coop ("0"),
# parts of k of it, narrow blocks of exl3_moe ("128").
WIDE, SPLIT = "EXL3_MOE_COOP_WIDE", "EXL3_MOE_COOP_KSPLIT"
NARROW_TILE = "EXL3_MOE_TILE_N"
COLD_BYTES = 200e6  # a graph reads at least as much: four times the cache
LOOKS = 8
TOLERANCE = {"ours": 1e-3, "exl3_moe_coop": 1e-2, "exl3_moe": 1e-2}  # theirs adds in fp16
Call = Callable[[int], torch.Tensor]  # over the set of experts of that number


@dataclass(frozen=True)
class Row:
    shape: Shape
    touched: int
    host: bool = False

    @property
    def top_k(self) -> int:
        return self.touched if self.touched < 12 else 6

    @property
    def facts(self) -> Facts:
        home, tokens = "host" if self.host else "device", self.touched // self.top_k
        return {
            "codebook": self.shape.codebook,
            "hidden": self.shape.hidden,
            "home": home,
            "touched": self.touched,
            "tokens": tokens,
        }


class Case:
    """One row's experts, inputs and calls; `sets` of experts a graph."""

    def __init__(self, extension: Any, row: Row, experts: RandomExperts) -> None:
        tokens, size = row.touched // row.top_k, row.touched * row.shape.expert_bytes
        self.row, self.experts = row, experts
        self.sets = min(experts.count // row.touched, max(CALLS, math.ceil(COLD_BYTES / size)))
        hosts = set(range(experts.count)) if row.host else set()
        self.table = experts.table(hosts)
        self.layer = Layer(extension, row.shape, experts.rows(hosts), tokens, row.top_k)
        self.x = torch.randn(tokens, row.shape.hidden, device="cuda").half()
        half = routing(tokens, row.top_k, experts.count)[0].half()
        self.weights = half.float()
        every = torch.arange(self.sets * row.touched, device="cuda", dtype=torch.int32)
        self.ids = list(every.view(self.sets, tokens, row.top_k))
        self.picks = [Picks.of(half, ids, experts.count) for ids in self.ids]

    def ours(self, which: int) -> torch.Tensor:
        return cuda.decode(self.x, self.weights, self.ids[which], self.table)

    def theirs(self) -> dict[str, Call]:
        """exl3_moe without and with the number of experts that have picks."""
        layer, x, picks, touched = self.layer, self.x, self.picks, self.row.touched
        return {
            "exl3_moe_coop": lambda which: layer.coop(x, picks[which]),
            "exl3_moe": lambda which: layer.moe(x, picks[which]),
            "exl3_moe, counted": lambda which: layer.moe(x, picks[which], touched),
        }

    def replay(self, call: Call) -> Callable[[], object]:
        return captured(lambda: [call(which) for which in range(self.sets)]).replay

    def copy(self) -> Callable[[], object]:
        """Pinned memory to the device, the bytes of a call, as often as a graph has calls."""
        size = self.row.touched * self.row.shape.expert_bytes
        source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(size, dtype=torch.uint8, device="cuda")
        return lambda: [target.copy_(source, non_blocking=True) for _ in range(self.sets)]

    def errors(self, calls: dict[str, Call]) -> dict[str, float]:
        """Relative, of the first set, against float64."""
        expected = self.experts.expected(self.x, self.weights, self.ids[0])
        self.layer.sum.zero_()
        return {
            name: float((call(0).double() - expected).norm() / expected.norm())
            for name, call in calls.items()
        }


def in_turn(replays: dict[str, Callable[[], object]], repeats: int, calls: int) -> dict[str, float]:
    """Median microseconds of each one's call, one replay of each after the other."""
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in replays}
    for turn in range(3 + repeats):
        for name, replay in replays.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            if turn >= 3:
                marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3 / calls
        for name, pairs in marks.items()
    }


def look(case: Case) -> Facts:
    """Microseconds of each of their kernels in this process's settings."""
    theirs = case.theirs()
    if SPLIT in os.environ:  # says nothing to exl3_moe
        theirs = {"exl3_moe_coop": theirs["exl3_moe_coop"]}
    replays = {name: case.replay(call) for name, call in theirs.items()}
    return dict(in_turn(replays, LOOKS, case.sets))


def compare(case: Case, moe: str, repeats: int) -> Facts:
    """Ours, exl3_moe_coop and the better exl3_moe (`moe`) in turn, and each one's error."""
    theirs = case.theirs()
    calls = {"ours": case.ours, "exl3_moe_coop": theirs["exl3_moe_coop"], "exl3_moe": theirs[moe]}
    replays = {name: case.replay(call) for name, call in calls.items()}
    if case.row.host:
        replays["copy"] = case.copy()
    us = in_turn(replays, repeats, case.sets)
    best = min(("exl3_moe_coop", "exl3_moe"), key=lambda name: us[name])
    facts: Facts = {f"{name}_us": value for name, value in us.items()}
    facts |= {"best": moe if best == "exl3_moe" else best, "ratio": us["ours"] / us[best]}
    if case.row.host:
        facts |= {"ours_of_copy": us["copy"] / us["ours"], "theirs_of_copy": us["copy"] / us[best]}
    errors = case.errors(calls)
    facts |= {f"{name}_error": f"{error:.1e}" for name, error in errors.items()}
    return {**facts, "sets": case.sets, "right": all(errors[n] <= TOLERANCE[n] for n in errors)}
