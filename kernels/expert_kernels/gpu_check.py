"""Every CUDA op against the float64 reference, on this GPU: `python -m expert_kernels.gpu_check`.

One JSON line a section, each on its own: one that fails or hangs does not stop the next. Exit code
1 if any failed. Inputs are random in every call; outputs are compared whole.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from expert_kernels import build, codec, cuda, ops, reference
from expert_kernels.synthetic import RandomExperts, Shape, routing

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 4e-3}
Facts = dict[str, Any]
Section = Callable[[], Iterator[Facts]]


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def inputs(tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(tokens, hidden, generator=generator, device="cuda").to(dtype)


def environment() -> Iterator[Facts]:
    p = torch.cuda.get_device_properties(0)
    architecture = f"sm_{p.major}{p.minor}"
    start = time.perf_counter()
    path = build.library_path(architecture)
    cuda.library(architecture)
    yield {
        "ok": True,
        "gpu": p.name,
        "architecture": architecture,
        "multiprocessors": p.multi_processor_count,
        "torch": torch.__version__,
        "library": path.name,
        "prebuilt": path in build.PREBUILT,
        "source": build.source_of(path),
        "seconds": round(time.perf_counter() - start, 1),
    }


def reconstruct() -> Iterator[Facts]:
    """W_hat of every format from both homes: bit for bit the codec's."""
    k, n = 256, 384
    for codebook in codec.CODEBOOKS:
        halves = codec.HALF_BITS if codebook == "mul1" else ()
        for bits in (*codec.WHOLE_BITS, *halves):
            shape = (k // 16, n // 16, int(16 * bits))
            trellis = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16).pin_memory()
            expected = codec.decode_trellis(trellis, codebook).cuda()
            same = []
            for home in (trellis.cuda(), trellis):
                out = torch.full((k, n), float("nan"), dtype=torch.float16, device="cuda")
                cuda.reconstruct(home.data_ptr(), k, n, bits, codebook, out)
                same.append(torch.equal(out, expected))
            yield {"ok": all(same), "codebook": codebook, "bits": bits, "device_host": same}


def _compare(
    experts: RandomExperts,
    tokens: int,
    top_k: int,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    limit: float | None = None,
    weight_on_input: bool = False,
    overlap: bool = True,
) -> Facts:
    x = inputs(tokens, experts.shape.hidden, dtype, seed)
    weights, ids = routing(tokens, top_k, experts.count, seed=seed)
    options: Facts = {"swiglu_limit": limit, "weight_on_input": weight_on_input, "overlap": overlap}
    half = set(range(0, experts.count, 2))
    outs = [
        cuda.decode(x, weights, ids, experts.table(homes), **options)
        for homes in ((), half, range(experts.count))
    ]
    again = cuda.decode(x, weights, ids, experts.table(half), **options)
    error = relative_error(outs[0], experts.expected(x, weights, ids, limit, weight_on_input))
    identical = all(torch.equal(outs[0], other) for other in (*outs[1:], again))
    return {
        "ok": error <= TOLERANCE[dtype] and identical,
        "tokens": tokens,
        "top_k": top_k,
        "dtype": str(dtype).removeprefix("torch."),
        "error": error,
        "homes_identical": identical,
    }


def formats() -> Iterator[Facts]:
    """Every K and codebook, the same in all projections and mixed."""
    for codebook in codec.CODEBOOKS:
        halves = codec.HALF_BITS if codebook == "mul1" else ()
        mixed = [(2.0, 4.0, 3.0), (8.0, 1.0, 5.0)]
        for bits in [*((b, b, b) for b in (*codec.WHOLE_BITS, *halves)), *mixed]:
            experts = RandomExperts(6, Shape(512, 384, bits=bits, codebook=codebook))
            for tokens in (1, 8, 20):
                facts = _compare(experts, tokens, 3, torch.float16, seed=tokens)
                yield {"codebook": codebook, "bits": bits, **facts}


def rows() -> Iterator[Facts]:
    """Rows an expert from 1 to 64, dtypes, limit, weight on the input, without overlap."""
    experts = RandomExperts(4, Shape(512, 384))
    for tokens in (1, 2, 4, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64):
        for top_k in (1, 4):  # with 4 of 4 every expert has every row
            for dtype in TOLERANCE:
                yield _compare(experts, tokens, top_k, dtype, seed=tokens)
        yield {"limit": 0.5, **_compare(experts, tokens, 2, torch.float16, limit=0.5)}
        yield {
            "weight_on_input": True,
            **_compare(experts, tokens, 1, torch.float16, weight_on_input=True),
        }
        yield {"overlap": False, **_compare(experts, tokens, 2, torch.float16, overlap=False)}


def real_shapes() -> Iterator[Facts]:
    for hidden, intermediate in ((5120, 2304), (7168, 2048), (5120, 1152), (4096, 2048)):
        experts = RandomExperts(8, Shape(hidden, intermediate))
        for tokens in (1, 4, 8, 12, 33, 64):
            facts = _compare(experts, tokens, 6, torch.float16, seed=tokens)
            yield {"hidden": hidden, "intermediate": intermediate, **facts}


def odd_picks() -> Iterator[Facts]:
    """-1 adds nothing, no pick gives zeros, a pick twice counts twice, more rows than a group."""
    experts = RandomExperts(6, Shape(512, 384))
    table = experts.table({1, 2})
    x = inputs(8, 512, torch.float16, 1)
    weights, ids = routing(8, 3, 6, seed=1)
    for name, changed in {
        "some of another rank": torch.where(ids >= 3, -1, ids),
        "a token without picks": torch.where(torch.arange(8, device="cuda")[:, None] == 2, -1, ids),
        "no picks at all": torch.full_like(ids, -1),
        "one expert in every slot": torch.full_like(ids, 4),
        "int64": ids.long(),
    }.items():
        out = cuda.decode(x, weights, changed, table)
        expected = experts.expected(x, weights, changed)
        error = float((out.double() - expected).norm() / expected.norm().clamp(min=1e-9))
        yield {"ok": error <= 1e-3, "case": name, "error": error}
    missing = table.addresses.clone()
    missing[4] = 0
    gone = ops.ExpertTable(missing, 512, 384, table.bits, table.codebook, table.host_range)
    counters = cuda.DeviceCounters(
        torch.zeros(6, dtype=torch.int64, device="cuda"),
        torch.zeros(2, dtype=torch.int64, device="cuda"),
    )
    out = cuda.decode(x, weights, ids, gone, counters=counters)
    hit = (ids == 4).any(1)
    whole = cuda.decode(x, weights, ids, table)
    right = out[hit].isnan().all() and torch.equal(out[~hit], whole[~hit])
    picks = torch.bincount(ids.flatten().long(), minlength=6)
    read = sum(experts.shape.expert_bytes for e in (1, 2) if picks[e])
    counted = torch.equal(counters.picks, picks) and counters.reads.tolist() == [
        read,
        int(picks[4]),
    ]
    yield {
        "ok": bool(right) and counted,
        "case": "an expert that is not here",
        "reads": counters.reads.tolist(),
        "expected": [read, int(picks[4])],
    }


def prefill() -> Iterator[Facts]:
    """More than 64 tokens: dense products, host experts through the staging buffers."""
    cases: list[tuple[Shape, int, int, int, dict[str, Any]]] = [
        (Shape(512, 384), 24, 65, 3, {}),
        (Shape(512, 384), 24, 700, 6, {"limit": 0.5}),
        (Shape(512, 384), 40, 300, 1, {"weight_on_input": True}),
        (Shape(512, 384, bits=(2.0, 4.0, 5.0), codebook="mul1"), 20, 400, 2, {}),
        (Shape(512, 384), 2, 9000, 2, {}),  # more rows an expert than the scratch holds
        (Shape(), 20, 1024, 6, {}),
    ]
    for shape, count, tokens, top_k, options in cases:
        experts = RandomExperts(count, shape)
        for dtype in (torch.float16, torch.bfloat16):
            x = inputs(tokens, shape.hidden, dtype, tokens)
            weights, ids = routing(tokens, top_k, count, seed=tokens)
            ids[3] = -1
            limit, on_input = options.get("limit"), options.get("weight_on_input", False)
            outs = [
                ops.experts(
                    *(x, weights, ids, experts.table(homes)),
                    swiglu_limit=limit,
                    weight_on_input=on_input,
                )
                for homes in ((), set(range(0, count, 2)), range(count))
            ]
            expected = experts.expected(x, weights, ids, limit, on_input)
            error = relative_error(outs[0], expected)
            identical = all(torch.equal(outs[0], other) for other in outs[1:])
            yield {
                "ok": error <= TOLERANCE[dtype] and identical,
                "hidden": shape.hidden,
                "tokens": tokens,
                "dtype": str(dtype),
                "error": error,
                "homes_identical": identical,
                **options,
            }


def linear() -> Iterator[Facts]:
    """One EXL3 matrix: rows, dtypes, k in parts, a shard of columns, in a graph; few and many."""
    for k, n, bits, codebook in (
        (512, 384, 3.0, "mcg"),
        (1024, 640, 2.5, "mul1"),
        (2048, 128 * 300, 6.0, "mcg"),
        (5120, 5120, 3.0, "3inst"),
    ):
        shape = (k // 16, n // 16, int(16 * bits))
        trellis = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda")
        suh, svh = (torch.rand(size, device="cuda").half() + 0.5 for size in (k, n))
        svh /= k**0.5
        for tokens in (1, 3, 64, 1000):
            for dtype in TOLERANCE:
                x = inputs(tokens, k, dtype, tokens)
                expected = reference.linear(x.double(), trellis, suh, svh, codebook)
                out = ops.linear(x, trellis, suh, svh, codebook)
                shard = ops.linear(x, trellis, suh, svh, codebook, columns=(5, n - 70))
                error = relative_error(out, expected)
                same = torch.equal(shard, out[:, 5 : n - 70])
                yield {
                    "ok": error <= TOLERANCE[dtype] and same,
                    "k": k,
                    "n": n,
                    "tokens": tokens,
                    "dtype": str(dtype),
                    "error": error,
                    "shard": same,
                }
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            again = ops.linear(x, trellis, suh, svh, codebook)
        again.zero_()
        captured.replay()
        yield {"ok": torch.equal(again, out), "k": k, "graph": True}


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


def summarise(lines: list[Facts]) -> Facts:
    """Of a section with many cases: how many, the worst error, and those that failed, whole."""
    errors = [line["error"] for line in lines if "error" in line]
    return {
        "ok": bool(lines) and all(line["ok"] for line in lines),
        "cases": len(lines),
        "worst_error": max(errors, default=None),
        "failed": [line for line in lines if not line["ok"]][:6],
        **({} if len(lines) > 1 else lines[0]),
    }


def run(sections: dict[str, Section]) -> None:
    """Each in turn, one line before and one after; ends at the first broken CUDA context."""
    for name, section in sections.items():
        _say({"section": name, "begins": True})
        start, lines, failure = time.perf_counter(), [], None
        try:
            for line in section():
                lines.append(line)
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 (a section that fails must not hide the others)
            failure = traceback.format_exc().splitlines()[-6:]
        facts = summarise(lines) if lines else {"ok": False}
        if failure:
            facts |= {"ok": False, "exception": failure}
        _say({"section": name, **facts, "wall_s": round(time.perf_counter() - start, 1)})
        if failure and any("CUDA error" in line for line in failure):
            return


def supervise(names: list[str], options: list[str], seconds: float) -> bool:
    """Runs the sections in a child, and the rest in a new one if it dies or says nothing for long.

    A broken or hung CUDA context takes its whole process with it; the parent has none.
    """
    left, fine = list(names), True
    while left:
        command = [sys.executable, "-u", "-m", "expert_kernels.gpu_check", "--child", *options]
        child = subprocess.Popen([*command, "--only", *left], stdout=subprocess.PIPE)
        assert child.stdout is not None
        timer: threading.Timer | None = None
        for raw in child.stdout:
            if timer is not None:
                timer.cancel()
            timer = threading.Timer(seconds, child.kill)
            timer.start()
            facts = json.loads(raw)
            if "begins" not in facts:
                left.remove(facts["section"])
                fine = fine and facts["ok"]
                _say(facts)
        code = child.wait()
        if timer is not None:
            timer.cancel()
        if left and (code != 0 or len(left) == len(names)):
            fine = False
            _say({"section": left.pop(0), "ok": False, "died": code, "limit_s": seconds})
        names = list(left)
    return fine


def _say(facts: Facts) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m expert_kernels.gpu_check", description=__doc__)
    parser.add_argument("--only", nargs="+", help="sections to run")
    parser.add_argument("--steps", type=int, default=10_000, help="of the stress run")
    parser.add_argument("--stress-seconds", type=float, default=40.0)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds a section may take")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    sections: dict[str, Section] = {
        "environment": environment,
        "reconstruct": reconstruct,
        "formats": formats,
        "rows": rows,
        "odd_picks": odd_picks,
        "real_shapes": real_shapes,
        "prefill": prefill,
        "linear": linear,
        "graph": graph,
        "back_to_back": back_to_back,
        "stress": lambda: stress(a.steps, a.stress_seconds),
    }
    names = [name for name in sections if not a.only or name in a.only]
    if a.child:
        run({name: sections[name] for name in names})
        return 0
    options = ["--steps", str(a.steps), "--stress-seconds", str(a.stress_seconds)]
    return 0 if supervise(names, options, a.limit) else 1


if __name__ == "__main__":
    sys.exit(main())
