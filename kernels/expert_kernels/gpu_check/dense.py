"""Dense matrices, single EXL3 linears, and many tokens through a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from expert_kernels import codec, cuda, ops
from expert_kernels.gpu_check.compare import (
    TOLERANCE,
    Facts,
    expected_outputs,
    inputs,
    relative_error,
)
from expert_kernels.synthetic import RandomExperts, Shape, random_matrix, routing


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


def prefill() -> Iterator[Facts]:
    """More than 64 tokens: dense products, host experts through the staging buffers."""
    cases: list[tuple[Shape, int, int, int, dict[str, Any]]] = [
        (Shape(512, 384), 24, 65, 3, {}),
        (Shape(512, 384), 24, 700, 6, {"limit": 0.5}),
        (Shape(512, 384), 40, 300, 1, {"weight_on_input": True}),
        (Shape(512, 384, bits=(2.0, 4.0, 5.0), codebook="mul1"), 20, 400, 2, {}),
        (Shape(512, 384), 2, 9000, 2, {}),  # more rows an expert than the scratch holds
        (Shape(512, 384), 3, 1200, 2, {}),  # dense beside fused, cut by groups
        (Shape(512, 384), 120, 3000, 6, {}),  # several groups at once, host slots used again
        (Shape(), 20, 1024, 6, {}),
        (Shape(), 40, 1024, 6, {}),  # fused, as many rows as a piece and some more
        (Shape(7168, 2048), 40, 800, 6, {}),
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


def prefill_formats() -> Iterator[Facts]:
    """The fused products of every K and codebook; rows around a piece's and a warp's."""
    for codebook in codec.CODEBOOKS:
        halves = codec.HALF_BITS if codebook == "mul1" else ()
        mixed = [(2.0, 4.0, 3.0), (8.0, 8.0, 1.0)]
        for bits in [*((b, b, b) for b in (*codec.WHOLE_BITS, *halves)), *mixed]:
            experts = RandomExperts(3, Shape(512, 384, bits=bits, codebook=codebook))
            for rows in (65, 128, 129, 200):
                x = inputs(3 * rows, 512, torch.float16, rows)
                ids = torch.arange(3, device="cuda", dtype=torch.int32).repeat_interleave(rows)
                ids[: rows // 2] = 2  # uneven
                weights = torch.rand(3 * rows, 1, device="cuda") + 0.1
                ids = ids.view(-1, 1)
                here, there = (
                    ops.experts(x, weights, ids, experts.table(homes)) for homes in ((), {0, 2})
                )
                error = relative_error(here, experts.expected(x, weights, ids))
                yield {
                    "ok": error <= 1e-3 and torch.equal(here, there),
                    "codebook": codebook,
                    "bits": bits,
                    "rows": rows,
                    "error": error,
                }


def linear() -> Iterator[Facts]:
    """EXL3 matrices side by side: few and many rows, dtypes, formats, shards, in a graph."""
    for k, codebook, sizes in (
        (512, "mcg", [(384, 3.0, 0)]),
        (128, "mcg", [(128, 3.0, 5)]),
        (1024, "mul1", [(640, 2.5, 5), (128, 3.5, 0)]),
        (2048, "mcg", [(128 * 300, 6.0, 70)]),
        (5120, "3inst", [(4096, 3.0, 0), (1024, 4.0, 5), (1024, 3.0, 0)]),
        (4096, "mcg", [(5120, 3.0, 0)]),
        (640, "mcg", [(128, b, 3) for b in (1.0, 2.0, 5.0, 7.0, 8.0)]),  # two launches
    ):
        matrices = [random_matrix(k, n, bits, codebook, skip) for n, bits, skip in sizes]
        for tokens in (1, 3, 8, 9, 16, 17, 32, 33, 1000):
            for dtype in TOLERANCE:
                x = inputs(tokens, k, dtype, tokens)
                expected = expected_outputs(x, matrices)
                out = ops.linear(x, matrices)
                error = relative_error(out, expected)
                same = torch.equal(out, ops.linear(x, matrices))
                yield {
                    "ok": error <= TOLERANCE[dtype] and same,
                    "k": k,
                    "matrices": len(matrices),
                    "tokens": tokens,
                    "dtype": str(dtype),
                    "error": error,
                    "again": same,
                }
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                again = ops.linear(x, matrices)
            again.zero_()
            captured.replay()
            captured.replay()
            yield {"ok": torch.equal(again, out), "k": k, "tokens": tokens, "graph": True}
