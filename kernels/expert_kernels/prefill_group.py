"""Scratch of groups of rows in prefill, and what is launched for one: inputs gathered, products
fused with decoding or through dense weights, outputs added.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from expert_kernels import interface

if TYPE_CHECKING:
    from expert_kernels.ops import ExpertTable
    from expert_kernels.prefill_schedule import Piece

GATHER, ACTIVATE, ADD = range(3)
_P, _I = ctypes.c_void_p, ctypes.c_int32


class Group:
    """Inputs, products and dense weights of `window` groups, in scratch that later ones reuse."""

    def __init__(
        self,
        lib: ctypes.CDLL,
        call: interface.Prefill,
        rows: int,
        table: ExpertTable,
        device: torch.device,
        window: int = 1,
    ) -> None:
        hidden, inner = table.hidden_size, table.intermediate_size
        self.lib, self.call, self.table, self.device = lib, call, table, device
        self.all_inputs, self.all_outputs = (
            [torch.empty(window, rows, d, dtype=dtype, device=device) for d in sizes]
            for dtype, sizes in (
                (torch.float16, (hidden, hidden, inner)),
                (torch.float32, (inner, inner, hidden)),
            )
        )
        self.window, self.limit = window, rows
        self.before = call.first  # picks of nobody's: sorted before every group's
        self.use(0, rows)
        self.bits8 = (_I * 3)(*(int(8 * bits) for bits in table.bits))
        self.codebook = interface.CODEBOOKS[table.codebook]
        self.dense: dict[int, list[torch.Tensor]] = {}  # by stream

    @property
    def stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream

    def use(self, index: int, rows: int) -> None:
        """What comes next is of the `index`-th group, which has so many rows."""
        self.inputs, self.outputs = (
            [t[index % self.window] for t in tensors]
            for tensors in (self.all_inputs, self.all_outputs)
        )
        call = self.call
        call.input_gate, call.input_up, call.act = (t.data_ptr() for t in self.inputs)
        call.gate, call.up, call.y = (t.data_ptr() for t in self.outputs)
        call.first, call.group_rows = self.before + index * self.limit, rows

    def step(self, which: int) -> None:
        code = self.lib.experts_prefill(ctypes.byref(self.call), which, self.stream)
        interface.check(self.lib, code, "prefill")

    def fused(self, pieces_at: int, count: int) -> None:
        """From inputs to y for `count` ExpertsPiece at a device address."""
        code = self.lib.experts_pieces(
            *(ctypes.byref(self.call), pieces_at, count, self.bits8, self.codebook, self.stream)
        )
        interface.check(self.lib, code, f"{count} pieces of prefill")

    def through_dense(self, piece: Piece, addresses: list[int]) -> None:
        """The piece's rows through its expert, whose three matrices become dense for it."""
        hidden, inner = self.table.hidden_size, self.table.intermediate_size
        if self.stream not in self.dense:
            shapes = ((hidden, inner), (hidden, inner), (inner, hidden))
            self.dense[self.stream] = [self.inputs[0].new_empty(shape) for shape in shapes]
        at = (_P * 3)(*(t.data_ptr() for t in self.dense[self.stream]))
        code = self.lib.experts_reconstruct_expert(
            *((_P * 3)(*addresses), at, hidden, inner, self.bits8, self.codebook, self.stream)
        )
        interface.check(self.lib, code, "reconstruct an expert")
        rows = slice(piece.at, piece.at + piece.rows)
        self._product(0, rows)
        self._product(1, rows)
        self.call.at, self.call.rows = piece.at, piece.rows
        self.step(ACTIVATE)
        self._product(2, rows)

    def _product(self, projection: int, rows: slice) -> None:
        left, out = self.inputs[projection][rows], self.outputs[projection][rows]
        dense = self.dense[self.stream][projection]
        torch.ops.aten.mm.dtype_out(left, dense, torch.float32, out=out)
