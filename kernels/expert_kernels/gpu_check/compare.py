"""One routed layer on the device against the float64 reference, from every mixture of homes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from expert_kernels import cuda, launch, reference
from expert_kernels.ops import Matrix
from expert_kernels.synthetic import RandomExperts, routing

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 4e-3}
Facts = dict[str, Any]
Section = Callable[[], Iterator[Facts]]


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def inputs(tokens: int, hidden: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(tokens, hidden, generator=generator, device="cuda").to(dtype)


def compare(
    experts: RandomExperts,
    tokens: int,
    top_k: int,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    limit: float | None = None,
    weight_on_input: bool = False,
    chosen: launch.DecodeLaunch | None = None,
) -> Facts:
    x = inputs(tokens, experts.shape.hidden, dtype, seed)
    weights, ids = routing(tokens, top_k, experts.count, seed=seed)
    options: Facts = {"swiglu_limit": limit, "weight_on_input": weight_on_input}
    options["chosen"] = chosen
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


def expected_outputs(x: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor:
    """`ops.linear` in float64, by the reference."""
    parts = [
        reference.linear(x.double(), m.trellis, m.suh, m.svh, m.codebook)[:, slice(*m.columns)]
        for m in matrices
    ]
    return torch.cat(parts, dim=1)
