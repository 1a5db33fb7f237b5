"""The ops in plain torch: the specification that kernels are held to, and the CPU engine's ops.

A linear of k inputs and n outputs stores W = diag(suh) H W_hat H diag(svh), where H is
blockdiag(Sylvester-128) / sqrt(128) on either side. Source: FACTS section 2.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from expert_kernels.codec import bits_of, decode_trellis

if TYPE_CHECKING:
    from expert_kernels.ops import ExpertTable

HADAMARD = 128
# 1/sqrt(128) on both sides: a power of two, so H can be plain signs and this costs no rounding.
_BOTH_SIDES = 1.0 / HADAMARD


@lru_cache
def _sylvester(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[128, 128] of +1 and -1: row i, column j is the parity of the bits of i & j."""
    h = torch.ones((1, 1), dtype=dtype, device=device)
    while h.shape[0] < HADAMARD:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """[.., d] times blockdiag(Sylvester-128), signs only."""
    h = _sylvester(x.dtype, x.device)
    return (x.reshape(*x.shape[:-1], x.shape[-1] // HADAMARD, HADAMARD) @ h).reshape(x.shape)


def check_linear(trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor) -> None:
    """ValueError unless these are the parts of one linear."""
    bits_of(trellis)
    k, n = 16 * trellis.shape[0], 16 * trellis.shape[1]
    if k % HADAMARD or n % HADAMARD:
        raise ValueError(
            f"a linear of {k} inputs and {n} outputs: both must be multiples of {HADAMARD},"
            " the rotation's block"
        )
    for name, scale, size in (("suh", suh, k), ("svh", svh, n)):
        if tuple(scale.shape) != (size,):
            raise ValueError(f"{name} has shape {list(scale.shape)}, the trellis wants [{size}]")


def dequantise(
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight W [k, n] in the original basis: y = x @ W.

    trellis int16 [k/16, n/16, 16*K], suh [k], svh [n]; k and n multiples of 128. Worked out in
    float64, where both rotations are exact (sums of 2^14 fp16 numbers take 41 bits): float64
    results carry two roundings, of the scales; narrower ones are those, rounded.
    """
    check_linear(trellis, suh, svh)
    n = 16 * trellis.shape[1]
    out = torch.empty((16 * trellis.shape[0], n), dtype=dtype, device=trellis.device)
    h = _sylvester(torch.float64, trellis.device)
    for start in range(0, len(out), HADAMARD):
        rows = slice(start, start + HADAMARD)
        tiles = trellis[start // 16 : (start + HADAMARD) // 16]
        w = _rotate(h @ decode_trellis(tiles, codebook, torch.float64)) * _BOTH_SIDES
        out[rows] = w * suh[rows].double().unsqueeze(1) * svh.double()
    return out


def linear(
    x: torch.Tensor, trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, codebook: str
) -> torch.Tensor:
    """x @ W through the rotated basis, (((x * suh) H) W_hat) H * svh, in x's dtype.

    x [.., k] -> [.., n]; accumulated in float32, in float64 if x is float64. Shards of a tensor
    parallel split are linears of their own: parts of n to concatenate, parts of k to add.
    """
    check_linear(trellis, suh, svh)
    if x.shape[-1] != len(suh):
        raise ValueError(f"x has {x.shape[-1]} columns, the linear has {len(suh)} inputs")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = _rotate(wide * suh) @ decode_trellis(trellis, codebook, wide.dtype)
    return (_rotate(y) * (svh.to(wide.dtype) * _BOTH_SIDES)).to(x.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up; with a limit gate is clamped above, up on both sides, before.

    Source: vLLM 0.32.0, `_swiglu_limit_torch` in model_executor/layers/fused_moe/utils.py and
    SiluAndMulWithClamp in model_executor/layers/activation.py.
    """
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return torch.nn.functional.silu(gate) * up


def _tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The host memory at an address as a tensor; nothing is copied, nothing is kept alive."""
    size = dtype.itemsize
    for length in shape:
        size *= length
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


def _projection(
    x: torch.Tensor, addresses: list[int], k: int, n: int, bits: float, codebook: str
) -> torch.Tensor:
    trellis = _tensor_at(addresses[0], (k // 16, n // 16, int(16 * bits)), torch.int16)
    suh = _tensor_at(addresses[1], (k,), torch.float16)
    svh = _tensor_at(addresses[2], (n,), torch.float16)
    return linear(x, trellis, suh, svh, codebook)


def _store(table: ExpertTable, expert: int, to: int) -> None:
    """The three trellises behind each other at `to`."""
    for (trellis, _, _), bits in zip(table.addresses_of(expert), table.bits, strict=True):
        size = int(table.hidden_size * table.intermediate_size * bits) // 8
        ctypes.memmove(to, trellis, size)
        to += size


def experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    table: ExpertTable,
    *,
    swiglu_limit: float | None = None,
    weight_on_input: bool = False,
    fill: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.experts` on host memory; see the contract there. Arguments are checked there."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    weights = topk_weights.to(wide.dtype).flatten()
    out = torch.zeros_like(wide)
    picks = topk_ids.flatten().argsort(stable=True)
    touched, counts = topk_ids.flatten()[picks].unique_consecutive(return_counts=True)
    hidden, inner = table.hidden_size, table.intermediate_size
    # Experts in ascending order: every token's sum has one order, whatever the homes.
    for expert, chosen in zip(touched.tolist(), picks.split(counts.tolist()), strict=True):
        if expert < 0:
            continue
        gate_at, up_at, down_at = table.addresses_of(expert)
        gate_bits, up_bits, down_bits = table.bits
        tokens, weight = chosen // topk_ids.shape[1], weights[chosen].unsqueeze(1)
        rows = wide[tokens] * weight if weight_on_input else wide[tokens]
        gate = _projection(rows, gate_at, hidden, inner, gate_bits, table.codebook)
        up = _projection(rows, up_at, hidden, inner, up_bits, table.codebook)
        act = swiglu(gate, up, swiglu_limit)
        y = _projection(act, down_at, inner, hidden, down_bits, table.codebook)
        out.index_add_(0, tokens, y if weight_on_input else y * weight)
        if fill is not None and fill[expert] > 0:
            _store(table, expert, int(fill[expert]))
            fill[expert].neg_()
    return out.to(x.dtype)
