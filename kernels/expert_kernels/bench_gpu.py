"""The kernels against this machine's own ceilings: `python -m expert_kernels.bench_gpu --out FILE`.

First what is expected (from FACTS section 3), then one JSON line a measurement, written as it is
made. Times are medians of `--repeats` replays of a CUDA graph, on events; a graph holds several
calls over different experts, so that device weights do not come from the L2 cache.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from expert_kernels import build, cuda, launch, prefill
from expert_kernels.synthetic import RandomExperts, Shape, routing

Facts = dict[str, Any]
SHAPES = (Shape(5120, 2304), Shape(7168, 2048))
CALLS = 4  # different sets of experts a graph
LINK_BYTES_A_SECOND = 55e9  # for predictions only: pinned memcpy, FACTS section 3
ZERO_COPY_SHARE = 0.925

PREDICTIONS: list[Facts] = [
    {"what": "decode, 6 host experts", "share_of_memcpy": 0.92},
    {"what": "decode, 1 host expert", "share_of_memcpy": 0.90},
    {"what": "mixed layer, over the slower of its parts", "ratio": 1.05},
    {"what": "device experts, 5120x2304 K=3, 6 touched", "microseconds": 100},
    {"what": "device experts, 5120x2304 K=3, 36 touched", "microseconds": 480},
    {"what": "prefill 8192 tokens, over the slower of copy and compute", "ratio": 1.10},
]


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
        tokens = touched // top_k
        self.experts, self.repeats = experts, repeats
        self.x = torch.randn(tokens, experts.shape.hidden, device="cuda").bfloat16()
        self.sets: list[tuple[torch.Tensor, torch.Tensor]] = []
        hosts: set[int] = set()
        for call in range(CALLS):
            first = call * touched
            weights, _ = routing(tokens, top_k, experts.count)
            ids = first + torch.arange(touched, device="cuda", dtype=torch.int32).view(
                tokens, top_k
            )
            self.sets.append((weights, ids))
            hosts |= set(range(first, first + on_host))
        self.hosts = hosts
        self.table = experts.table(hosts)
        self.is_host = torch.tensor([e in hosts for e in range(experts.count)], device="cuda")

    def microseconds(self, part: str = "all", **options: Any) -> float:
        """Of one call; `part` leaves only picks of host or of device experts."""
        sets = []
        for weights, ids in self.sets:
            keep = torch.ones_like(ids, dtype=torch.bool)
            if part != "all":
                keep = self.is_host[ids.long()] == (part == "host")
            sets.append((weights, torch.where(keep, ids, -1)))

        def calls() -> None:
            for weights, ids in sets:
                cuda.decode(self.x, weights, ids, self.table, **options)

        calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        return median_us(graph.replay, self.repeats) / CALLS


def memcpy_us(experts: RandomExperts, count: int, repeats: int) -> float:
    """Pinned memory to the device, the bytes of `count` experts in one copy."""
    size = count * experts.shape.expert_bytes
    source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    source.random_()
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    return median_us(lambda: target.copy_(source, non_blocking=True), repeats)


def host_experts(shape: Shape, repeats: int) -> Iterator[Facts]:
    experts = RandomExperts(24, shape)
    for touched in (1, 6):
        us = Problem(experts, touched, touched, touched, repeats).microseconds()
        copy = memcpy_us(experts, touched, repeats)
        yield {"host": touched, "us": us, "memcpy_us": copy, "share_of_memcpy": copy / us}


def device_experts(shape: Shape, repeats: int) -> Iterator[Facts]:
    experts = RandomExperts(48 * CALLS, shape, host=False)
    for touched in (1, 6, 12, 24, 36, 48):
        us = Problem(experts, touched, min(6, touched), 0, repeats).microseconds()
        rate = touched * shape.expert_bytes / us * 1e6
        yield {"touched": touched, "us": us, "bytes_a_second": rate}


def mixed(shape: Shape, repeats: int) -> Iterator[Facts]:
    experts = RandomExperts(36 * CALLS, shape)
    for touched in (6, 24, 36):
        for hosts in range(7):
            p = Problem(experts, touched, 6, hosts, repeats)
            us = p.microseconds()
            parts = {part: p.microseconds(part) for part in ("host", "device")}
            slower = max(parts.values())
            names = {f"{part}_alone_us": value for part, value in parts.items()}
            yield {"touched": touched, "host": hosts, "us": us, **names, "ratio": us / slower}


def tuning(shape: Shape, repeats: int) -> Iterator[Facts]:
    """What the launch's numbers do: they are in launch.py because of this."""
    experts = RandomExperts(36 * CALLS, shape)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    for touched, hosts in ((1, 1), (6, 6), (6, 0), (6, 2), (24, 1), (36, 0), (36, 6)):
        problem = Problem(experts, touched, min(6, touched), hosts, repeats)
        top_k = min(6, touched)
        usual = launch.decode(
            touched // top_k, shape.hidden, shape.intermediate, count, top_k=top_k
        )
        changes: list[Facts] = [
            *({"link_blocks": n} for n in (16, 24, 64) if hosts),
            *({"link_blocks": n, "host_blocks": n} for n in (16, 24, 32, 48, 64) if hosts),
            *({"link_blocks": 32, "host_blocks": n} for n in (96, count) if hosts),
            *({"split_a": n} for n in (1, 2, 4)),
        ]
        yield {"touched": touched, "host": hosts, "us": problem.microseconds()}
        yield {
            "touched": touched,
            "host": hosts,
            "overlap": False,
            "us": problem.microseconds(overlap=False),
        }
        for change in changes:
            if change.get("split_a", 1) > usual.split_a:
                continue  # the scratch is sized for the usual split
            chosen = dataclasses.replace(usual, **change)
            us = problem.microseconds(chosen=chosen)
            yield {"touched": touched, "host": hosts, **change, "us": us}


def prefill_layer(tokens: int, count: int, hosts: int, repeats: int) -> Iterator[Facts]:
    shape = SHAPES[0]
    experts = RandomExperts(count, shape)
    x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
    weights, ids = routing(tokens, 6, count)
    on_host = set(range(0, count, max(1, count // hosts))) if hosts else set()
    on_host = set(sorted(on_host)[:hosts])
    tables = {"mixed": experts.table(on_host), "compute": experts.table()}

    def layer(table: str) -> float:
        return median_us(lambda: prefill.prefill(x, weights, ids, tables[table]), repeats) / 1e3

    def copies() -> None:
        trellises = prefill.Trellises(
            cuda.library_for(x.device), tables["mixed"], sorted(on_host), x.device
        )
        for expert in sorted(on_host):
            trellises.of(expert)
            trellises.done(expert)

    whole, compute, copy = layer("mixed"), layer("compute"), median_us(copies, repeats) / 1e3
    yield {
        "tokens": tokens,
        "experts": count,
        "host": len(on_host),
        "ms": whole,
        "copy_alone_ms": copy,
        "compute_alone_ms": compute,
        "ratio": whole / max(copy, compute),
        "copied_bytes": len(on_host) * shape.expert_bytes,
    }
    yield {"prefill_dense_us": dict(_pieces(experts, tokens * 6 // count))}


def _pieces(experts: RandomExperts, rows: int) -> Iterator[tuple[str, float]]:
    """Where an expert's time in prefill goes: one dense matrix, one product."""
    k, n = experts.shape.linear(0)
    dense = torch.empty(k, n, dtype=torch.float16, device="cuda")
    left = torch.randn(rows, k, device="cuda").half()
    address = int(experts.table().addresses[0, 0, 0])
    out = torch.empty(rows, n, dtype=torch.float32, device="cuda")
    yield "reconstruct", _of_one(lambda: cuda.reconstruct(address, k, n, 3.0, "mcg", dense))
    product = torch.ops.aten.mm.dtype_out
    yield (
        f"product of {rows} rows",
        _of_one(lambda: product(left, dense, torch.float32, out=out)),
    )
    yield "product, called", median_us(lambda: product(left, dense, torch.float32, out=out), 50)


def _of_one(call: Callable[[], object], times: int = 20) -> float:
    """Microseconds of one of `times` calls in a graph: without what calling costs the host."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return median_us(graph.replay, 20) / times


def sections(repeats: int) -> dict[str, Callable[[], Iterator[Facts]]]:
    out: dict[str, Callable[[], Iterator[Facts]]] = {}
    for shape in SHAPES:
        name = f"{shape.hidden}x{shape.intermediate}"
        out[f"host experts {name}"] = lambda s=shape: host_experts(s, repeats)  # type: ignore[misc]
        out[f"device experts {name}"] = lambda s=shape: device_experts(s, repeats)  # type: ignore[misc]
    out["mixed 5120x2304"] = lambda: mixed(SHAPES[0], repeats // 2)
    out["prefill"] = lambda: prefill_layer(8192, 384, 115, 5)
    out["tuning 5120x2304"] = lambda: tuning(SHAPES[0], repeats // 4)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m expert_kernels.bench_gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="also append the lines to this file")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--only", nargs="+", help="words of the sections to run")
    parser.add_argument("--seconds", type=float, default=110.0, help="start no section after this")
    a = parser.parse_args(argv)
    start, fine = time.perf_counter(), True

    def say(facts: Facts) -> None:
        rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in facts.items()}
        sys.stdout.write(json.dumps(rounded) + "\n")
        sys.stdout.flush()
        if a.out:
            with a.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rounded) + "\n")

    for facts in PREDICTIONS:
        say({"predicted": facts})
    p = torch.cuda.get_device_properties(0)
    say(
        {
            "gpu": p.name,
            "torch": torch.__version__,
            "repeats": a.repeats,
            "source": build.digest(),
        }
    )
    for name, section in sections(a.repeats).items():
        if a.only and not any(word in name for word in a.only):
            continue
        if time.perf_counter() - start > a.seconds:
            say({"section": name, "skipped": f"{a.seconds:g} s are over"})
            continue
        try:
            for facts in section():
                say({"section": name, **facts})
        except Exception:  # noqa: BLE001 (one failed section must not cost the others)
            fine = False
            say({"section": name, "exception": traceback.format_exc().splitlines()[-4:]})
        say({"section": name, "ended_at_s": round(time.perf_counter() - start, 1)})
        torch.cuda.empty_cache()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
