"""Tensors to be written: their names, dtypes, shapes, and how to draw their bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from appliance.checkpoint.synth import draw
from appliance.checkpoint.synth.spec import BLOCK

ITEM_BYTES = {
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "F32": 4,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor. `draw` makes its bytes; a tensor of which only the header is wanted has none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    draw: draw.Draw | None = None

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def splits_over_two_ranks(k: int, n: int, *, along: str) -> bool:
    """Whether EXL3 holds a [k, n] linear whole and halved along "k", "n" or "" (replicated)."""
    halves = (2 * BLOCK if along == "k" else BLOCK, 2 * BLOCK if along == "n" else BLOCK)
    return k % halves[0] == 0 and n % halves[1] == 0


def exl3(
    name: str,
    k: int,
    n: int,
    bits: float,
    codebook: str,
    *,
    gain: float = 1.0,
    quiet: Collection[int] = (),
) -> Iterator[Part]:
    """The stored tensors of one EXL3 linear: k inputs, n outputs, K bits (FACTS section 2)."""
    shape = (k // 16, n // 16, int(16 * bits))
    yield Part(f"{name}.trellis", "I16", shape, draw.trellis(2 * math.prod(shape)))
    yield Part(f"{name}.suh", "F16", (k,), draw.scales(k))
    svh = draw.scales(n, draw.output_scale(k, codebook, gain), quiet)
    yield Part(f"{name}.svh", "F16", (n,), svh)
    if codebook in draw.MARKERS:
        yield Part(f"{name}.{codebook}", "I32", (), draw.marker(codebook))


def dense(
    name: str, k: int, n: int, *, gain: float = 1.0, quiet: Collection[int] = ()
) -> Iterator[Part]:
    """One bf16 linear, stored [n, k]."""
    yield Part(f"{name}.weight", "BF16", (n, k), draw.rows(n, k, gain / math.sqrt(k), quiet))


def norm(name: str, size: int) -> Part:
    """RMSNorm weights about 1, never exactly 1, so a norm left out is seen."""
    return Part(f"{name}.weight", "BF16", (size,), draw.normal(size, 0.1, mean=1.0))
