"""exllamav3's two kernels for a routed layer, over the experts that ours are measured on.

Its extension's own functions, with buffers of the sizes its modules/block_sparse_mlp.py (1.6.5)
makes. Both take tables of addresses, so that a host expert is only another address to them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from expert_kernels.synthetic import Shape

MOST_TOKENS = 8  # of exl3_moe_coop: its MAX_BSZN
MOST_SLOTS = 256
ROWS_AN_EXPERT = 128  # its MOE_FUSED_ROWS
SILU = 0
CODEBOOKS = ("mcg", "mul1")  # of exl3_moe, which has no other


class UnavailableError(RuntimeError):
    """There is no exllamav3 here. The message has the way out."""


def load(folder: Path | None) -> Any:
    """The module `exllamav3_ext`: of a folder, else installed, else as exllamav3 compiles it."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("exllamav3_ext")
    except ImportError as no_module:
        said = no_module
    if folder is not None:
        raise UnavailableError(
            f"{folder} has no exllamav3_ext that can be imported ({said}). Try: name the folder"
            " that holds it, or leave --extension out where exllamav3 is installed"
        )
    try:
        return importlib.import_module("exllamav3.ext").exllamav3_ext
    except ImportError as no_package:
        raise UnavailableError(
            f"exllamav3 cannot be imported ({no_package}), so there is nothing to measure beside."
            " Try: pip install exllamav3==1.6.5 (its first import compiles for minutes), or"
            " --extension FOLDER with a built exllamav3_ext"
        ) from no_package


def version(extension: Any) -> str:
    said = getattr(extension, "__version__", None)
    return str(said or importlib.metadata.version("exllamav3"))


@dataclass(frozen=True)
class Picks:
    """Routing as each kernel wants it; none of this is timed.

    sel int64 and weights fp16 [T, k]; for exl3_moe picks per expert int64 [E + 1], and tokens
    (int64) and weights (fp16) [T k] in the order of experts.
    """

    sel: torch.Tensor
    weights: torch.Tensor
    count: torch.Tensor
    tokens: torch.Tensor
    sorted_weights: torch.Tensor

    @classmethod
    def of(cls, weights: torch.Tensor, ids: torch.Tensor, experts: int) -> Picks:
        sel, half = ids.long().contiguous(), weights.half().contiguous()
        order = sel.flatten().argsort(stable=True)
        return cls(
            sel,
            half,
            torch.bincount(sel.flatten(), minlength=experts + 1),
            order // sel.shape[1],
            half.flatten()[order],
        )


class Layer:
    """Both kernels with their buffers, for calls of one shape on one stream."""

    def __init__(
        self, extension: Any, shape: Shape, rows: torch.Tensor, tokens: int, top_k: int
    ) -> None:
        """`rows` int64 [E, 3, 3]: address of trellis, suh, svh of each expert's gate, up, down."""
        if len(set(shape.bits)) > 1 or shape.codebook not in CODEBOOKS:
            raise ValueError(f"one K and codebook {' or '.join(CODEBOOKS)} here, not {shape}")
        self.extension, self.shape = extension, shape
        self._codebook = tuple(shape.codebook == name for name in CODEBOOKS)
        # Split as its own build would, and room for parts of k that are asked for by its settings.
        slots = min(MOST_SLOTS, max(MOST_TOKENS * top_k, 4 * tokens * top_k))
        self.tables = tuple(
            rows[:, p, which].contiguous().cuda() for p in range(3) for which in range(3)
        )
        h, i = shape.hidden, shape.intermediate

        def half(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float16, device="cuda")

        counters = slots * (i // 128) + MOST_TOKENS * (h // 128) + 2 * slots + 3
        self.rows_out = torch.zeros(MOST_TOKENS, h, device="cuda")
        self._coop = (
            *(half(slots, 1, h), half(slots, h), half(slots, 1, i), half(slots, 1, i)),
            *(half(slots, 1, i), torch.empty(slots, 1, h, device="cuda")),
            torch.zeros(counters, dtype=torch.int32, device="cuda"),
            self.rows_out,
        )
        groups = extension.exl3_moe_max_concurrency(torch.cuda.current_device())
        self._moe = tuple(half(groups, ROWS_AN_EXPERT, width) for width in (h, h, i, i))
        self.sum = torch.zeros(tokens, h, device="cuda")

    def coop(self, x: torch.Tensor, picks: Picks) -> torch.Tensor:
        """exl3_moe_coop: float32 [T, H], overwritten by the next call. x fp16 [T, H]."""
        s, k = self.shape, self.shape.bits[0]
        self.extension.exl3_moe_coop(
            *(x, picks.sel, picks.weights, -1, -1, s.hidden, *self.tables, None, None, None),
            *(k, k, k, *self._codebook, SILU, 0.0, True, *self._coop, None, None),
        )
        return self.rows_out[: len(x)]

    def moe(self, x: torch.Tensor, picks: Picks, active: int = -1) -> torch.Tensor:
        """exl3_moe, its kernel alone, added to `self.sum`: float32 [T, H], which it returns.

        `active` experts have picks; -1 is what exllamav3 says of a few rows, to spare a wait.
        """
        k, codebook = self.shape.bits[0], self._codebook * 3
        self.extension.exl3_moe(
            *(x, self.sum, picks.count, picks.tokens, picks.sorted_weights, *self._moe, SILU),
            *(k, k, k, *self.tables, *codebook, 0.0, active, None, None, 1, ROWS_AN_EXPERT, 16),
        )
        return self.sum
