"""EXL3 matrices that share their inputs on a GPU, outputs side by side.

Few rows: weights are read in place and decoded on their way into the matrix units, two launches
for up to four matrices. More rows: inputs rotated, W_hat made dense part by part, cuBLAS, rotated
back. Nothing waits, so a call can be captured in a CUDA graph. The dense parts go to scratch that
is taken once a device, because graphs hold its address; calls of more than 32 rows must be ordered,
as on one stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from expert_kernels import cuda, interface, launch
from expert_kernels.codec import bits_of

if TYPE_CHECKING:
    from expert_kernels.ops import Matrix

DENSE_BYTES = 64 << 20  # a part of W_hat: a head of 150,000 words is dense 128 inputs at a time

_dense: dict[int, torch.Tensor] = {}


def prepare(device: torch.device) -> torch.Tensor:
    """The scratch for dense parts, fp16 and flat: taken now if nobody has, kept for ever."""
    index = interface.index_of(device)
    if index not in _dense:
        if torch.cuda.is_current_stream_capturing():
            raise interface.CudaError("the first linear takes memory: make one before capturing")
        _dense[index] = torch.empty(DENSE_BYTES // 2, dtype=torch.float16, device=device)
    return _dense[index]


def linear(x: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor:
    """`ops.linear` for x [T, k] on a GPU; arguments are checked there."""
    x, width = x.contiguous(), sum(m.width for m in matrices)
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    at = 0
    few = len(x) <= launch.LINEAR_ROWS
    for start in range(0, len(matrices), interface.MATRICES):
        some = matrices[start : start + interface.MATRICES]
        if few:
            in_place(x, some, out, at)
        for m in some:
            if not few:
                dense(x, m, out, at)
            at += m.width
    return out


def in_place(
    x: torch.Tensor,
    matrices: Sequence[Matrix],
    out: torch.Tensor,
    at: int,
    chosen: launch.LinearLaunch | None = None,
) -> None:
    """Outputs of 1 to 4 matrices of one codebook, for 1 to 32 rows, to columns of `out` from `at`.

    `chosen` is for measurements.
    """
    lib, (rows, k) = interface.library_for(x.device), x.shape
    blocks = sum(len(m.svh) for m in matrices) // launch.BLOCK
    architecture, multiprocessors = interface.device_of(x.device)
    plan = chosen or launch.linear(rows, k, blocks, multiprocessors, architecture)
    rotated = torch.empty(len(matrices), rows, k, dtype=torch.float16, device=x.device)
    partial = torch.empty(
        rows * blocks * plan.split * launch.BLOCK if plan.split > 1 else 0,
        dtype=torch.float32,
        device=x.device,
    )
    arrived = torch.empty(blocks, dtype=torch.int32, device=x.device)
    call = interface.Linear(
        x=x.data_ptr(),
        out=out.data_ptr(),
        rotated=rotated.data_ptr(),
        partial=partial.data_ptr(),
        arrived=arrived.data_ptr(),
        count=len(matrices),
        rows=rows,
        k=k,
        stride=out.shape[1],
        dtype=interface.DTYPES[x.dtype],
        codebook=interface.CODEBOOKS[matrices[0].codebook],
        blocks=blocks,
        split=plan.split,
        groups=plan.groups,
        ring_bytes=plan.ring_bytes,
    )
    for i, m in enumerate(matrices):
        call.matrix[i] = interface.Matrix(
            trellis=m.trellis.data_ptr(),
            suh=m.suh.data_ptr(),
            svh=m.svh.data_ptr(),
            n=len(m.svh),
            bits8=int(8 * bits_of(m.trellis)),
            skip=m.columns[0],
            columns=m.width,
            at=at,
        )
        at += m.width
    stream = torch.cuda.current_stream(x.device).cuda_stream
    interface.check(
        lib, lib.experts_linear(ctypes.byref(call), stream), "few rows through matrices"
    )


def dense(x: torch.Tensor, matrix: Matrix, out: torch.Tensor, at: int) -> None:
    """Outputs of one matrix for any number of rows, into columns of `out` from `at`."""
    lib, scratch = interface.library_for(x.device), prepare(x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    (rows, k), n, bits = x.shape, len(matrix.svh), bits_of(matrix.trellis)
    rotated = torch.empty(rows, k, dtype=torch.float16, device=x.device)
    dtype = interface.DTYPES[x.dtype]
    code = lib.experts_rotate_in(
        x.data_ptr(), matrix.suh.data_ptr(), rotated.data_ptr(), rows, k, dtype, stream
    )
    interface.check(lib, code, "rotate inputs")
    step = min(k, max(128, scratch.numel() // n // 128 * 128))
    if step * n > scratch.numel():
        raise interface.CudaError(
            f"{n} outputs are more than {scratch.numel() // 128} in one matrix"
        )
    y: torch.Tensor | None = None
    for start in range(0, k, step):
        end = min(k, start + step)
        part = scratch[: (end - start) * n].view(end - start, n)
        address = matrix.trellis[start // 16 : end // 16].data_ptr()
        cuda.reconstruct(address, end - start, n, bits, matrix.codebook, part)
        product = torch.ops.aten.mm.dtype(rotated[:, start:end], part, torch.float32)
        y = product if y is None else y.add_(product)
    assert y is not None
    code = lib.experts_rotate_out(
        *(y.data_ptr(), matrix.svh.data_ptr(), out[:, at:].data_ptr(), rows, n),
        *(matrix.columns[0], matrix.width, out.shape[1], dtype, stream),
    )
    interface.check(lib, code, "rotate outputs")
