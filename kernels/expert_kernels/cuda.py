"""The ops on an NVIDIA GPU: csrc's C interface over raw pointers, on torch's current stream.

Nothing here waits for the device in a decode call, so it can be captured in a CUDA graph. Scratch
is taken once a device and shape and kept for the life of the process, because graphs hold its
addresses; calls that share it must be ordered, as calls on one stream are.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from expert_kernels import interface, launch

if TYPE_CHECKING:
    from expert_kernels.lookup import RowTable
    from expert_kernels.ops import ExpertTable


@dataclass(frozen=True, eq=False)
class DeviceCounters:
    """Counted on the device, read by whoever wants to, never in a step.

    picks int64 [experts]: per row of the table. reads int64 [2]: bytes of experts read from host
    memory, and picks of an expert that was not here (their rows became NaN).
    """

    picks: torch.Tensor
    reads: torch.Tensor


class Scratch:
    """Buffers of decode calls of one shape on one device, for up to 64 tokens."""

    def __init__(self, index: int, hidden: int, intermediate: int, top_k: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise interface.CudaError(
                "the first call of a shape takes memory: make one before capturing"
            )
        device = torch.device("cuda", index)
        architecture, count = interface.device_of(device)
        self.lib = interface.library(architecture)
        picks = min(launch.MAX_TOKENS * top_k, launch.MAX_PICKS)
        self.launches: dict[int, launch.DecodeLaunch] = {}
        sizes = {"rotated": 0, "act": 0, "partial_a": 0, "partial_b": 0, "y": 0}
        for tokens in (1, 2, 4, 8, 16, 32, 64):
            plan = launch.decode(tokens, hidden, intermediate, count, architecture, top_k=top_k)
            self.launches[tokens] = plan
            need = launch.workspace(plan, min(tokens * top_k, picks), hidden, intermediate)
            sizes = {name: max(size, getattr(need, name)) for name, size in sizes.items()}
        self.buffers = {
            name: torch.empty(size, dtype=torch.uint8, device=device)
            for name, size in sizes.items()
        }
        control = self.lib.experts_control_bytes(picks, hidden, intermediate)
        self.control = torch.zeros(control, dtype=torch.uint8, device=device)

    def launch_for(self, tokens: int) -> launch.DecodeLaunch:
        return self.launches[launch.alike(tokens)]


_scratch: dict[tuple[int, int, int, int], Scratch] = {}


def scratch(device: torch.device, hidden: int, intermediate: int, top_k: int) -> Scratch:
    key = (interface.index_of(device), hidden, intermediate, top_k)
    if key not in _scratch:
        _scratch[key] = Scratch(*key)
    return _scratch[key]


def prepare(table: ExpertTable, top_k: int) -> None:
    """Take all scratch that calls over this table keep, so that none is taken later."""
    from expert_kernels import linear, staging

    device = table.addresses.device
    scratch(device, table.hidden_size, table.intermediate_size, top_k)
    linear.prepare(device)
    if table.host_range[0] != table.host_range[1]:
        weights = table.hidden_size * table.intermediate_size
        staging.prepare(device, sum(int(weights * bits) // 8 for bits in table.bits))


def decode(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    table: ExpertTable,
    *,
    swiglu_limit: float | None = None,
    weight_on_input: bool = False,
    counters: DeviceCounters | None = None,
    fill: torch.Tensor | None = None,
    chosen: launch.DecodeLaunch | None = None,
    trace: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.experts` for 1 to 64 tokens: weights read in place, once an expert, no host sync.

    `chosen` and `trace` (int64 [blocks, 64, 3], zero) are for measurements.
    Arguments are checked in ops.
    """
    x, topk_weights, topk_ids = (t.contiguous() for t in (x, topk_weights, topk_ids))
    tokens, top_k = topk_ids.shape
    work = scratch(x.device, table.hidden_size, table.intermediate_size, top_k)
    plan = chosen or work.launch_for(tokens)
    out = torch.empty_like(x)
    call = interface.Decode(
        table=table.addresses.data_ptr(),
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        x=x.data_ptr(),
        out=out.data_ptr(),
        host_begin=table.host_range[0],
        host_end=table.host_range[1],
        control=work.control.data_ptr(),
        picks=None if counters is None else counters.picks.data_ptr(),
        reads=None if counters is None else counters.reads.data_ptr(),
        fill=None if fill is None else fill.data_ptr(),
        trace=None if trace is None else trace.data_ptr(),
        ids_are_64=topk_ids.dtype == torch.int64,
        dtype=interface.DTYPES[x.dtype],
        tokens=tokens,
        top_k=top_k,
        experts=table.experts,
        hidden=table.hidden_size,
        intermediate=table.intermediate_size,
        bits8=(ctypes.c_int32 * 3)(*(int(8 * bits) for bits in table.bits)),
        codebook=interface.CODEBOOKS[table.codebook],
        split_a=plan.split_a,
        split_b=plan.split_b,
        groups=plan.groups,
        blocks=plan.blocks,
        host_blocks=plan.host_blocks,
        link_percent=plan.link_percent,
        link_bytes=plan.link_bytes,
        ring_bytes=plan.ring_bytes,
        weight_on_input=weight_on_input,
        swiglu_limit=-1.0 if swiglu_limit is None else swiglu_limit,
        **{name: buffer.data_ptr() for name, buffer in work.buffers.items()},
    )
    stream = torch.cuda.current_stream(x.device).cuda_stream
    interface.check(work.lib, work.lib.experts_decode(ctypes.byref(call), stream), "routed layer")
    return out


def reconstruct(
    address: int, k: int, n: int, bits: float, codebook: str, out: torch.Tensor
) -> torch.Tensor:
    """W_hat fp16 [k, n] of the trellis at an address the device can read, into `out`."""
    lib = interface.library_for(out.device)
    stream = torch.cuda.current_stream(out.device).cuda_stream
    code = lib.experts_reconstruct(
        address, out.data_ptr(), k, n, int(8 * bits), interface.CODEBOOKS[codebook], stream
    )
    interface.check(lib, code, f"reconstruct {k} x {n}, K = {bits:g}")
    return out


def lookup(ids: torch.Tensor, table: RowTable, dtype: torch.dtype) -> torch.Tensor:
    """`lookup.lookup` for int64 ids [n] on a GPU, one at least. Arguments are checked there."""
    from expert_kernels.lookup import FORMATS, SORTED_FROM, VALUES

    lib, count = interface.library_for(ids.device), len(ids)
    out = torch.empty(count, VALUES, dtype=dtype, device=ids.device)
    ids, place = ids.sort() if count >= SORTED_FROM else (ids.contiguous(), None)
    stream = torch.cuda.current_stream(ids.device).cuda_stream
    code = lib.experts_lookup(
        *(table.address, table.rows, ids.data_ptr()),
        *(None if place is None else place.data_ptr(), count, out.data_ptr()),
        *(FORMATS[table.format], interface.DTYPES[dtype], stream),
    )
    interface.check(lib, code, f"lookup of {count:,} rows")
    return out
