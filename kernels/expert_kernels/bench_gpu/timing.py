"""Medians on the device, a copy of as many bytes, and how a script's lines are printed."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from expert_kernels import build, cuda
from expert_kernels.synthetic import RandomExperts, Shape, routing

Facts = dict[str, Any]
Claim = Callable[[int], Iterator[Facts]]  # repeats -> one line a measurement
SHAPES = (Shape(5120, 2304), Shape(7168, 2048))
CALLS = 4  # different sets of experts a graph


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Median microseconds of `call` on the device, after three that warm up."""
    for _ in range(3):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]
    return statistics.median(times)


class Problem:
    """Tokens over chosen experts, `CALLS` sets of them, captured as one graph."""

    def __init__(
        self, experts: RandomExperts, touched: int, top_k: int, on_host: int, repeats: int
    ):
        tokens = max(1, touched // top_k)  # fewer than top_k: the other picks are another rank's
        self.experts, self.repeats = experts, repeats
        self.x = torch.randn(tokens, experts.shape.hidden, device="cuda").bfloat16()
        self.sets: list[tuple[torch.Tensor, torch.Tensor]] = []
        hosts: set[int] = set()
        for call in range(CALLS):
            first = call * touched
            weights, _ = routing(tokens, top_k, experts.count)
            ids = torch.full((tokens * top_k,), -1, device="cuda", dtype=torch.int32)
            ids[:touched] = first + torch.arange(touched, device="cuda", dtype=torch.int32)
            ids = ids.view(tokens, top_k)
            self.sets.append((weights, ids))
            hosts |= set(range(first, first + on_host))
        self.hosts = hosts
        self.table = experts.table(hosts)
        self.is_host = torch.tensor([e in hosts for e in range(experts.count)], device="cuda")

    def microseconds(
        self,
        part: str = "all",
        before: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> float:
        """Of one call; `part` leaves only picks of host or of device experts.

        `before` comes first in every graph and is timed too.
        """
        sets = []
        for weights, ids in self.sets:
            keep = torch.ones_like(ids, dtype=torch.bool)
            if part != "all":
                keep = self.is_host[ids.long().clamp(min=0)] == (part == "host")
            sets.append((weights, torch.where(keep, ids, -1)))

        def calls() -> None:
            before()
            for weights, ids in sets:
                cuda.decode(self.x, weights, ids, self.table, **options)

        return median_us(captured(calls).replay, self.repeats) / CALLS


def memcpy_us(experts: RandomExperts, count: int, repeats: int) -> float:
    """Pinned memory to the device, the bytes of `count` experts in one copy."""
    size = count * experts.shape.expert_bytes
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    source.random_()
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    return median_us(lambda: target.copy_(source, non_blocking=True), repeats)


def captured(calls: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The calls as a graph, after one that takes what memory they keep."""
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph


def of_each(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Microseconds of one of these calls, behind each other in a graph."""

    def all_of_them() -> None:
        for call in calls:
            call()

    return median_us(captured(all_of_them).replay, repeats) / len(calls)


def of_one(call: Callable[[], object], times: int = 20) -> float:
    """Microseconds of one of `times` calls in a graph: without what calling costs the host."""
    return of_each([call] * times, 20)


class Printer:
    """One JSON line a fact, also to a file."""

    def __init__(self, out: Path | None) -> None:
        self.out, self.start = out, time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def say(self, facts: Facts) -> None:
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in facts.items()}
        sys.stdout.write(json.dumps(rounded) + "\n")
        sys.stdout.flush()
        if self.out:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rounded) + "\n")

    def measure(self, name: str, claim: Claim, repeats: int) -> bool:
        """False if it failed: one claim must not cost the others."""
        fine = True
        try:
            for facts in claim(repeats):
                self.say({"claim": name, **facts})
        except Exception:  # noqa: BLE001 (said, and the exit code is 1)
            fine = False
            self.say({"claim": name, "exception": traceback.format_exc().splitlines()[-4:]})
        self.say({"claim": name, "ended_at_s": round(self.seconds, 1)})
        torch.cuda.empty_cache()
        return fine


def machine() -> Facts:
    p = torch.cuda.get_device_properties(0)
    return {"gpu": p.name, "torch": torch.__version__, "source": build.digest()}


def parser(module: str, about: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    made.add_argument("--out", type=Path, help="also append the lines to this file")
    made.add_argument("--repeats", type=int, default=200)
    return made


def alone(claim: Claim, module: str, about: str | None) -> int:
    """A claim as a script of its own."""
    a = parser(module, about).parse_args()
    printer = Printer(a.out)
    printer.say(machine())
    return 0 if printer.measure(module.rpartition(".")[2], claim, a.repeats) else 1
