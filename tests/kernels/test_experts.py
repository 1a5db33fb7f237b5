"""The routed-experts op on host memory against a loop over tokens, written from its contract."""

import pytest
import torch
from torch.nn.functional import silu

from expert_kernels import ops, reference

pytestmark = pytest.mark.engine

HIDDEN, INNER, EXPERTS = 256, 128, 5
BITS = (3.0, 2.0, 4.0)


class Homes:
    """Experts in memory of their own, 128-byte aligned, and the table of their addresses."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN))
        self.tensors = [
            [_linear(k, n, bits, generator) for (k, n), bits in zip(shapes, BITS, strict=True)]
            for _ in range(EXPERTS)
        ]

    def table(self, codebook: str = "mcg") -> ops.ExpertTable:
        addresses = [[[t.data_ptr() for t in p] for p in e] for e in self.tensors]
        return ops.ExpertTable(torch.tensor(addresses), HIDDEN, INNER, BITS, codebook)


def _aligned(values: torch.Tensor) -> torch.Tensor:
    room = torch.empty(values.numel() + 64, dtype=values.dtype)
    skip = -room.data_ptr() % 128 // values.element_size()
    return room[skip : skip + values.numel()].view(values.shape).copy_(values)


def _linear(k: int, n: int, bits: float, generator: torch.Generator) -> list[torch.Tensor]:
    shape = (k // 16, n // 16, int(16 * bits))
    trellis = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)
    scales = [torch.randn(d, generator=generator).half() / d**0.5 for d in (k, n)]
    return [_aligned(trellis), *map(_aligned, scales)]


def _routing(tokens: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    picks = [torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)]
    return x, torch.rand(tokens, top_k, generator=generator), torch.stack(picks)


def _loop(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, homes: Homes, limit: float | None
) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, (w_row, id_row) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(w_row, id_row, strict=True):
            if expert == -1:
                continue
            gate, up, down = (
                reference.dequantise(*p, "mcg", torch.float64) for p in homes.tensors[expert]
            )
            g, u = x[token].double() @ gate, x[token].double() @ up
            if limit is not None:
                g, u = g.clamp(max=limit), u.clamp(min=-limit, max=limit)
            out[token] += weight * ((silu(g) * u) @ down)
    return out


@pytest.mark.parametrize("limit", [None, 0.05])
def test_experts_are_the_weighted_sum_over_each_tokens_picks(limit: float | None) -> None:
    homes = Homes()
    x, weights, ids = _routing(9)
    expected = _loop(x, weights, ids, homes, limit)
    exact = ops.experts(x.double(), weights, ids, homes.table(), swiglu_limit=limit)
    torch.testing.assert_close(exact, expected, rtol=1e-11, atol=1e-12 * expected.abs().max())
    got = ops.experts(x, weights, ids, homes.table(), swiglu_limit=limit)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
