"""Random experts in device memory and, the same bytes, in pinned host memory: any bits are a valid
trellis. For checks and measurements; layout as the engine's arena has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

import torch

from expert_kernels import cuda, launch, reference
from expert_kernels.ops import ExpertTable, Matrix

BLOCK_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True)
class Shape:
    """`bits` is K of gate, up, down."""

    hidden: int = 5120
    intermediate: int = 2304
    bits: tuple[float, float, float] = (3.0, 3.0, 3.0)
    codebook: str = "mcg"

    def linear(self, projection: int) -> tuple[int, int]:
        """Inputs and outputs of gate, up or down."""
        down = projection == 2
        return (self.intermediate, self.hidden) if down else (self.hidden, self.intermediate)

    def trellis_bytes(self, projection: int) -> int:
        return int(self.hidden * self.intermediate * self.bits[projection]) // 8

    @property
    def expert_bytes(self) -> int:
        """Of the three trellises: what reading an expert moves."""
        return sum(self.trellis_bytes(p) for p in range(3))

    @property
    def block_bytes(self) -> int:
        return -(-self.expert_bytes // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES


class RandomExperts:
    """`count` experts of one shape with a home in both memories; `table` picks who lives where."""

    def __init__(self, count: int, shape: Shape, *, seed: int = 0, host: bool = True) -> None:
        self.count, self.shape = count, shape
        generator = torch.Generator(device="cuda").manual_seed(seed)
        size = count * shape.block_bytes + BLOCK_ALIGNMENT_BYTES
        words = torch.randint(
            -(1 << 31), 1 << 31, (size // 4,), generator=generator, device="cuda", dtype=torch.int32
        )
        self._device = words.view(torch.uint8)
        self._device_at = _aligned(self._device)
        self._host: torch.Tensor | None = None
        self._host_at = 0
        if host:
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._host_at = _aligned(self._host)
            skip, from_ = self._host_at - self._host.data_ptr(), self._device_at - words.data_ptr()
            used = count * shape.block_bytes
            self._host[skip : skip + used].copy_(self._device[from_ : from_ + used])
        # Inputs of size 1 give sums of size 1: fp16 carries them as it carries a real layer's.
        width = shape.hidden + shape.intermediate
        scales = torch.rand(count, 3, width, generator=generator, device="cuda") + 0.5
        scales *= torch.sign(torch.randn(scales.shape, generator=generator, device="cuda"))
        for p in range(3):
            k, _ = shape.linear(p)
            scales[:, p, :k] /= k**0.5
        self.scales = scales.half()

    def scale(self, expert: int, projection: int, which: int) -> torch.Tensor:
        """suh (0) or svh (1)."""
        k, _ = self.shape.linear(projection)
        row = self.scales[expert, projection]
        return row[k:] if which else row[:k]

    def trellis(self, expert: int, projection: int) -> torch.Tensor:
        """int16 [k/16, n/16, 16K], the bytes in device memory."""
        k, n = self.shape.linear(projection)
        start = self._device_at - self._device.data_ptr() + self._offset(expert, projection)
        flat = self._device[start : start + self.shape.trellis_bytes(projection)]
        return flat.view(torch.int16).view(k // 16, n // 16, -1)

    def _offset(self, expert: int, projection: int) -> int:
        before = sum(self.shape.trellis_bytes(p) for p in range(projection))
        return expert * self.shape.block_bytes + before

    def rows(self, on_host: Collection[int]) -> torch.Tensor:
        """int64 [count, 3, 3] on the CPU: the table's numbers with these experts on the host."""
        if on_host and self._host is None:
            raise ValueError("these experts were made without a host home")
        out = torch.empty(self.count, 3, 3, dtype=torch.int64)
        for expert in range(self.count):
            base = self._host_at if expert in on_host else self._device_at
            for p in range(3):
                scales = [self.scale(expert, p, which).data_ptr() for which in (0, 1)]
                out[expert, p] = torch.tensor([base + self._offset(expert, p), *scales])
        return out

    def table(self, on_host: Collection[int] = ()) -> ExpertTable:
        s = self.shape
        host = (self._host_at, self._host_at + self.count * s.block_bytes)
        return ExpertTable(
            self.rows(on_host).cuda(), s.hidden, s.intermediate, s.bits, s.codebook, host
        )

    def expected(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        limit: float | None = None,
        weight_on_input: bool = False,
    ) -> torch.Tensor:
        """float64 [T, H]: the reference, expert by expert, on the GPU."""
        wide = x.double()
        out = torch.zeros_like(wide)
        for expert in sorted({e for e in ids.flatten().tolist() if e >= 0}):
            tokens, slots = (ids == expert).nonzero(as_tuple=True)
            weight = weights[tokens, slots].double().unsqueeze(1)
            rows = wide[tokens] * weight if weight_on_input else wide[tokens]
            gate, up = (self._linear(rows, expert, p) for p in (0, 1))
            y = self._linear(reference.swiglu(gate, up, limit), expert, 2)
            out.index_add_(0, tokens, y if weight_on_input else y * weight)
        return out

    def _linear(self, x: torch.Tensor, expert: int, p: int) -> torch.Tensor:
        suh, svh = (self.scale(expert, p, which) for which in (0, 1))
        return reference.linear(x, self.trellis(expert, p), suh, svh, self.shape.codebook)


def _aligned(memory: torch.Tensor) -> int:
    return -(-memory.data_ptr() // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES


def roomy(shape: Shape, top_k: int, tokens: int = 1) -> launch.DecodeLaunch:
    """The usual launch for so many tokens, 8 at most, with scratch for more parts of k."""
    device = torch.device("cuda")
    work = cuda.scratch(device, shape.hidden, shape.intermediate, top_k)
    usual = work.launch_for(tokens)
    most = dataclasses.replace(usual, split_a=16, split_b=8)
    need = launch.workspace(most, 8 * top_k, shape.hidden, shape.intermediate)
    for name in ("partial_a", "partial_b"):
        size = max(getattr(need, name), work.buffers[name].numel())
        work.buffers[name] = torch.empty(size, dtype=torch.uint8, device=device)
    return usual


def routing(
    tokens: int, top_k: int, experts: int, *, seed: int = 0, touched: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32 [T, k], ids int32 [T, k]) on the GPU, no expert twice in a row.

    With `touched` exactly that many experts are picked, as evenly as can be.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randperm(experts, generator=generator)[: touched or experts]
    if touched is None:
        rows = [pool[torch.randperm(len(pool), generator=generator)[:top_k]] for _ in range(tokens)]
        ids = torch.stack(rows)
    else:
        ids = pool[torch.arange(tokens * top_k) % touched].view(tokens, top_k)
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    return weights.cuda(), ids.int().cuda()


def random_matrix(k: int, n: int, bits: float, codebook: str, skip: int = 0) -> Matrix:
    """Any bits are a trellis. Outputs of inputs near 1 are near 1."""
    shape = (k // 16, n // 16, int(16 * bits))
    trellis = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda")
    suh, svh = (torch.rand(size, device="cuda").half() + 0.5 for size in (k, n))
    return Matrix(trellis, suh, svh / k**0.5, codebook, (skip, n - 2 * skip))
