"""One EXL3 matrix on a GPU: inputs rotated, W_hat made dense part by part, cuBLAS, rotated back.

Nothing waits, so a call can be captured in a CUDA graph. The dense parts go to scratch that is
taken once a device, because graphs hold its address; calls must be ordered, as on one stream.
"""

from __future__ import annotations

import torch

from expert_kernels import cuda
from expert_kernels.codec import bits_of

DENSE_BYTES = 64 << 20  # a part of W_hat: a head of 150,000 words is dense 128 inputs at a time

_dense: dict[int, torch.Tensor] = {}


def prepare(device: torch.device) -> torch.Tensor:
    """The scratch for dense parts, fp16 and flat: taken now if nobody has, kept for ever."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _dense:
        if torch.cuda.is_current_stream_capturing():
            raise cuda.CudaError("the first linear takes memory: make one before capturing")
        _dense[index] = torch.empty(DENSE_BYTES // 2, dtype=torch.float16, device=device)
    return _dense[index]


def linear(
    x: torch.Tensor,
    trellis: torch.Tensor,
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
    columns: tuple[int, int],
) -> torch.Tensor:
    """`ops.linear` for x [T, k] on a GPU; arguments are checked there."""
    lib = cuda.library_for(x.device)
    scratch = prepare(x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    rows, k = x.shape
    n, bits = 16 * trellis.shape[1], bits_of(trellis)
    x, width = x.contiguous(), columns[1] - columns[0]
    rotated = torch.empty(rows, k, dtype=torch.float16, device=x.device)
    dtype = cuda.DTYPES[x.dtype]
    code = lib.experts_rotate_in(
        x.data_ptr(), suh.data_ptr(), rotated.data_ptr(), rows, k, dtype, stream
    )
    cuda.check(lib, code, "rotate inputs")
    step = min(k, max(128, scratch.numel() // n // 128 * 128))
    if step * n > scratch.numel():
        raise cuda.CudaError(f"{n} outputs are more than {scratch.numel() // 128} in one matrix")
    y: torch.Tensor | None = None
    for start in range(0, k, step):
        end = min(k, start + step)
        dense = scratch[: (end - start) * n].view(end - start, n)
        address = trellis[start // 16 : end // 16].data_ptr()
        cuda.reconstruct(address, end - start, n, bits, codebook, dense)
        part = torch.ops.aten.mm.dtype(rotated[:, start:end], dense, torch.float32)
        y = part if y is None else y.add_(part)
    assert y is not None
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    code = lib.experts_rotate_out(
        y.data_ptr(),
        svh.data_ptr(),
        out.data_ptr(),
        rows,
        n,
        columns[0],
        width,
        width,
        dtype,
        stream,
    )
    cuda.check(lib, code, "rotate outputs")
    return out
