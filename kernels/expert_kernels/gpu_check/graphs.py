"""Captured calls, layers back to back, and tables rewritten at random."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import torch

from expert_kernels import cuda
from expert_kernels.gpu_check.compare import Facts, inputs, relative_error
from expert_kernels.synthetic import RandomExperts, Shape, routing


def graph() -> Iterator[Facts]:
    """A captured call follows a table rewritten between replays, and new inputs."""
    for tokens in (1, 8, 33):
        experts = RandomExperts(12, Shape(1024, 512))
        table = experts.table()
        x = inputs(tokens, 1024, torch.float16, 3)
        weights, ids = routing(tokens, 6, 12)
        cuda.decode(x, weights, ids, table)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = cuda.decode(x, weights, ids, table)
        right = 0
        for i in range(24):
            homes = set(random.Random(i).sample(range(12), i % 13))
            table.addresses.copy_(experts.rows(homes))
            x.copy_(inputs(tokens, 1024, torch.float16, 100 + i))
            new_weights, new_ids = routing(tokens, 6, 12, seed=i)
            weights.copy_(new_weights)
            ids.copy_(new_ids)
            out.fill_(float("nan"))
            captured.replay()
            error = relative_error(out, experts.expected(x, weights, ids))
            right += error <= 1e-3 and torch.equal(out, cuda.decode(x, weights, ids, table))
        yield {"ok": right == 24, "tokens": tokens, "replays": 24, "right": right}


def back_to_back() -> Iterator[Facts]:
    """Layers of one shape in a row, as a model runs them: one scratch, no wait between, each layer
    the next one's input. Eager and as one graph; against the same layers with a wait after each."""
    layers = []
    for seed in range(6):
        experts = RandomExperts(16, Shape(1024, 512), seed=seed)
        layers.append((experts, experts.table(range(seed, 16, 2))))
    for tokens in (1, 6, 8, 30, 64):
        x = inputs(tokens, 1024, torch.float16, tokens)
        routes = [routing(tokens, 6, 16, seed=100 * tokens + i) for i in range(len(layers))]

        def chain(wait: bool, x: torch.Tensor = x, routes: Any = routes) -> list[torch.Tensor]:
            outs, left = [], x
            for (_, table), (weights, ids) in zip(layers, routes, strict=True):
                left = cuda.decode(left, weights, ids, table)
                if wait:
                    torch.cuda.synchronize()
                outs.append(left)
                left = torch.nn.functional.rms_norm(left, (1024,))
            return outs

        apart = chain(True)
        eager = [chain(False) for _ in range(50)]
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            together = chain(False)
        wrong = sum(
            not torch.equal(a, b) for outs in eager for a, b in zip(outs, apart, strict=True)
        )
        graphs = 0
        for _ in range(200):
            for out in together:
                out.fill_(float("nan"))
            captured.replay()
            captured.replay()
            graphs += sum(not torch.equal(a, b) for a, b in zip(together, apart, strict=True))
        finite = all(bool(out.isfinite().all()) for out in apart)
        yield {
            "ok": finite and not wrong and not graphs,
            "tokens": tokens,
            "wrong_eager": wrong,
            "wrong_in_graphs": graphs,
        }


def stress(steps: int, seconds: float) -> Iterator[Facts]:
    """Tables rewritten at random before every replay; outputs equal those of device homes.

    A case keeps its inputs: a graph holds their addresses and nothing else does, so inputs that
    were let go came back as other tensors and every case but the last read those.
    """
    rng = random.Random(0)
    experts = RandomExperts(24, Shape(1024, 512))
    table, still = experts.table(), experts.table()
    everywhere = [experts.rows(()).cuda(), experts.rows(range(24)).cuda()]
    cases = []
    for tokens in (1, 2, 5, 8, 13, 40):
        x = inputs(tokens, 1024, torch.bfloat16, tokens)
        routed = routing(tokens, 6, 24, seed=tokens)
        expected = cuda.decode(x, *routed, still)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = cuda.decode(x, *routed, table)
        cases.append((captured, out, expected, x, routed))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    start, done = time.perf_counter(), 0
    while done < steps and time.perf_counter() - start < seconds:
        choose = torch.randint(0, 2, (24, 1, 1), device="cuda")
        table.addresses.copy_(torch.where(choose == 1, everywhere[1], everywhere[0]))
        captured, out, expected, *_ = rng.choice(cases)
        out.fill_(float("nan"))
        captured.replay()
        wrong += (out != expected).any()
        done += 1
        if done % 1000 == 0:
            torch.cuda.synchronize()
    yield {
        "ok": int(wrong) == 0 and done > 0,
        "steps": done,
        "asked": steps,
        "wrong": int(wrong),
        "seconds": round(time.perf_counter() - start, 1),
    }
