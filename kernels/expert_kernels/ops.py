"""The contract of each op: shapes, dtypes, alignment, bytes moved; argument checks; dispatch.

An expert is addresses, not a tensor. A layer's `ExpertTable` has one row per local expert:

    addresses  int64 [experts, 3, 3]   [gate | up | down] x [trellis | suh | svh], bytes, absolute
    bits       [3]                     K of gate, up, down (1..8, 1.5, 2.5, 3.5)
    codebook   "3inst" | "mcg" | "mul1"

A trellis address points at int16 [k/16, n/16, 16*K], contiguous, 128-byte aligned, in any memory
the device can read: its own, or pinned host memory. suh is fp16 [k], svh fp16 [n], in device
memory. gate and up have k = hidden, n = intermediate; down has k = intermediate, n = hidden.
`host_range` [begin, end) says which trellis addresses are host memory: a GPU reads those first,
because their bytes take longest. It never changes a bit of the result.

The table's storage is fixed; its numbers may change between calls, in stream order. 0 means "not
here": touching such an expert is an error. The op reads memory at call time and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from expert_kernels import reference
from expert_kernels.codec import check_format

if TYPE_CHECKING:
    from expert_kernels.cuda import DeviceCounters

TRELLIS_ALIGNMENT_BYTES = 128
PROJECTIONS = ("gate", "up", "down")
PARTS = ("trellis", "suh", "svh")
_ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """Where one layer's experts are on this rank, and their shape. Checked when it is made.

    addresses int64 [experts, 3, 3], contiguous, on the device that computes; `hidden_size` and
    `intermediate_size` (this rank's share) are multiples of 128; `bits` is K of gate, up, down.
    ValueError says which of these does not hold.
    """

    addresses: torch.Tensor
    hidden_size: int
    intermediate_size: int
    bits: tuple[float, float, float]
    codebook: str
    host_range: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        a = self.addresses
        if a.dtype != torch.int64 or tuple(a.shape[1:]) != (3, 3) or not a.is_contiguous():
            raise ValueError(
                f"addresses must be contiguous int64 [experts, 3, 3], not {a.dtype} {list(a.shape)}"
            )
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(self, name)
            if size <= 0 or size % reference.HADAMARD:
                raise ValueError(
                    f"{name} is {size}; EXL3 rotates blocks of {reference.HADAMARD}, so it must be"
                    " a multiple of that: use another tensor-parallel size, or expert parallelism"
                )
        if len(self.bits) != len(PROJECTIONS):
            raise ValueError(f"bits has {len(self.bits)} entries; gate, up and down make three")
        for bits in self.bits:
            check_format(bits, self.codebook)

    @property
    def experts(self) -> int:
        return int(self.addresses.shape[0])

    def addresses_of(self, expert: int) -> list[list[int]]:
        """[3][3] addresses of one expert, as they are now. ValueError if one cannot be read."""
        rows: list[list[int]] = self.addresses[expert].tolist()
        for projection, row in zip(PROJECTIONS, rows, strict=True):
            for part, address in zip(PARTS, row, strict=True):
                if address == 0:
                    raise ValueError(
                        f"expert {expert} has no {projection}.{part}: its address is 0, so it was"
                        " never loaded or has been taken away"
                    )
            if off := row[0] % TRELLIS_ALIGNMENT_BYTES:
                raise ValueError(
                    f"expert {expert}: {projection}.trellis is at {row[0]:#x}, {off} bytes off a"
                    f" {TRELLIS_ALIGNMENT_BYTES}-byte line: lay experts out aligned"
                )
        return rows


@dataclass(frozen=True, eq=False)
class Matrix:
    """One EXL3 matrix, and which of its outputs are wanted: [start, end) of `columns`.

    trellis int16 [k/16, n/16, 16*K], contiguous, 16-byte aligned; suh fp16 [k], svh fp16 [n]; k and
    n multiples of 128; all on one device. ValueError says which of these does not hold.
    """

    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: str
    columns: tuple[int, int]

    def __post_init__(self) -> None:
        reference.check_linear(self.trellis, self.suh, self.svh)
        start, end = self.columns
        if not 0 <= start < end <= len(self.svh):
            raise ValueError(f"outputs {start} to {end} are asked of {len(self.svh)}")
        if not self.trellis.is_contiguous():
            raise ValueError("the trellis is not contiguous")

    @property
    def width(self) -> int:
        return self.columns[1] - self.columns[0]


def linear(x: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor:
    """x @ W of each EXL3 matrix, outputs side by side.

    x [.., k] floating, on the matrices' device; they share k and the codebook. Returns
    [.., sum of widths] in x's dtype. On a GPU inputs are rounded to fp16 and products are added in
    float32, in an order that depends on shapes alone. There up to 32 rows read each weight once, in
    place; more rows write W_hat and read it again: 4*k*n bytes.
    """
    kinds = {(len(m.suh), m.codebook) for m in matrices}
    if len(kinds) != 1 or x.shape[-1] != len(matrices[0].suh):
        of = ", ".join(f"{len(m.suh)} inputs ({m.codebook})" for m in matrices)
        raise ValueError(f"x has {x.shape[-1]} columns for matrices of {of}: they must share both")
    if x.device.type == "cpu" or x.numel() == 0:
        parts = [
            reference.linear(x, m.trellis, m.suh, m.svh, m.codebook)[..., slice(*m.columns)]
            for m in matrices
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    if x.device.type != "cuda":
        raise NotImplementedError(f"linear on {x.device.type}: there are CPU and CUDA ops only")
    if off := [m.trellis.data_ptr() % 16 for m in matrices if m.trellis.data_ptr() % 16]:
        raise ValueError(
            f"a trellis is {off[0]} bytes off a multiple of 16: it is read 16 at a time"
        )
    from expert_kernels import linear as on_cuda

    y = on_cuda.linear(x.reshape(-1, x.shape[-1]), matrices)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    table: ExpertTable,
    *,
    swiglu_limit: float | None = None,
    weight_on_input: bool = False,
    counters: DeviceCounters | None = None,
    fill: torch.Tensor | None = None,
) -> torch.Tensor:
    """A layer's routed experts: sum over a token's picks of weight * down(silu(gate) * up).

    x [T, H] float32, bfloat16 or float16 (float64 on a CPU); topk_weights float32 [T, k];
    topk_ids int32 or int64 [T, k], rows of `table` (-1: an expert of another rank, adds nothing).
    Returns [T, H] in x's dtype; rows without a pick here are 0. With `weight_on_input` the weight
    scales the expert's input instead of its output.

    Accumulates in float32 (float64 for float64), experts of a token in ascending order of row:
    the bits of the result do not depend on where an expert lives. `counters` (CUDA only) are
    counted up on the device. Reads each touched expert once:
    H*I*(K_gate + K_up + K_down)/8 bytes of trellis and 6*(H + I) of scales.

    `fill` int64 [experts] on the table's device: where an expert's trellises are also stored, if
    this call touches it, as [gate | up | down] without gaps: a miss that is to be kept costs no
    second read. 0: nowhere. The call makes the address negative when it has stored, so it stores
    once; whoever reads fill later, in stream order, may then put -fill[e] into the table. Nothing
    else may read or write that memory meanwhile; 16-byte aligned.
    """
    _check(x, topk_weights, topk_ids, table, swiglu_limit)
    _check_fill(fill, table)
    options: dict[str, Any] = {"swiglu_limit": swiglu_limit, "weight_on_input": weight_on_input}
    options["fill"] = fill
    if x.device.type == "cpu" or not len(x):
        if counters is not None and len(x):
            raise ValueError("counters are counted by a GPU's kernels; on a CPU count the ids")
        return reference.experts(x, topk_weights, topk_ids, table, **options)
    return _gpu_op(x, topk_ids)(x, topk_weights, topk_ids, table, counters=counters, **options)


def _check_fill(fill: torch.Tensor | None, table: ExpertTable) -> None:
    if fill is None:
        return
    shape, device = (table.experts,), table.addresses.device
    right = fill.dtype == torch.int64 and fill.is_contiguous() and fill.device == device
    if not right or tuple(fill.shape) != shape:
        raise ValueError(
            f"fill must be contiguous int64 {list(shape)} on {device} like the table,"
            f" not {fill.dtype} {list(fill.shape)} on {fill.device}"
        )


def _gpu_op(x: torch.Tensor, topk_ids: torch.Tensor) -> Callable[..., torch.Tensor]:
    """On a GPU: in place for few tokens, else dense."""
    if x.device.type != "cuda":
        raise NotImplementedError(f"experts on {x.device.type}: there are CPU and CUDA ops only")
    from expert_kernels import cuda, launch, prefill

    few = len(x) <= launch.MAX_TOKENS and topk_ids.numel() <= launch.MAX_PICKS
    return cuda.decode if few else prefill.prefill


def _check(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    table: ExpertTable,
    swiglu_limit: float | None,
) -> None:
    if x.ndim != 2 or x.shape[1] != table.hidden_size or x.dtype not in _ACTIVATIONS:
        raise ValueError(
            f"x must be floating [tokens, {table.hidden_size}], not {x.dtype} {list(x.shape)}"
        )
    if topk_ids.ndim != 2 or len(topk_ids) != len(x):
        raise ValueError(f"topk_ids must be [{len(x)}, k], not {list(topk_ids.shape)}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids must be int32 or int64, not {topk_ids.dtype}")
    if topk_weights.shape != topk_ids.shape or topk_weights.dtype != torch.float32:
        raise ValueError(
            f"topk_weights must be float32 {list(topk_ids.shape)} like topk_ids,"
            f" not {topk_weights.dtype} {list(topk_weights.shape)}"
        )
    if len({t.device for t in (x, topk_weights, topk_ids, table.addresses)}) != 1:
        raise ValueError(
            f"x is on {x.device}, topk_weights on {topk_weights.device}, topk_ids on"
            f" {topk_ids.device}, the table on {table.addresses.device}: they must share a device"
        )
    if swiglu_limit is not None and not swiglu_limit > 0:
        raise ValueError(f"swiglu_limit is {swiglu_limit}; it must be positive, or None for none")
    if x.device.type == "cpu" and topk_ids.numel():
        low, high = int(topk_ids.min()), int(topk_ids.max())
        if low < -1 or high >= table.experts:
            raise ValueError(
                f"topk_ids run from {low} to {high}; the table has rows 0 to {table.experts - 1},"
                " and -1 is an expert of another rank"
            )
