"""Many tokens through a routed layer on a GPU: weights become dense, cuBLAS multiplies.

Experts go by in ascending order, whatever their home. Those on the host are copied in batches to
two buffers by the copy engine, the next batch under the products of this one, and from there they
are read like any other: the same bits whatever the home. Routing is read by the host once a layer,
so a call cannot be captured in a graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from expert_kernels import cuda, launch

if TYPE_CHECKING:
    from expert_kernels.cuda import DeviceCounters
    from expert_kernels.ops import ExpertTable

GATHER, ACTIVATE, ADD = range(3)
_P, _I = ctypes.c_void_p, ctypes.c_int32


class Prefill(ctypes.Structure):
    """ExpertsPrefill of csrc/experts.h, field by field."""

    _fields_ = (
        *((name, _P) for name in ("table", "ids", "weights", "x", "out", "order", "place")),
        *((name, _P) for name in ("input_gate", "input_up", "gate", "up", "act", "y")),
        ("first", ctypes.c_int64),
        *((name, _I) for name in ("group_rows", "at", "rows", "ids_are_64", "dtype", "tokens")),
        *((name, _I) for name in ("top_k", "experts", "hidden", "intermediate", "weight_on_input")),
        ("swiglu_limit", ctypes.c_float),
    )


class Staging:
    """Two buffers for batches of host experts, and the stream that fills them."""

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        size = launch.PREFILL_BATCH * block_bytes
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self.stream = torch.cuda.Stream(device)
        self.filled = [torch.cuda.Event() for _ in range(2)]
        self.read = [torch.cuda.Event() for _ in range(2)]


_staging: dict[tuple[int, int], Staging] = {}


def prepare(device: torch.device, block_bytes: int) -> None:
    """Take the staging memory for experts of this size now, so that no later call needs it."""
    _staging_for(device, block_bytes)


def _staging_for(device: torch.device, block_bytes: int) -> Staging:
    key = (torch.cuda.current_device() if device.index is None else device.index, block_bytes)
    if key not in _staging:
        _staging[key] = Staging(device, block_bytes)
    return _staging[key]


def batches(experts: Sequence[int], most: int) -> list[list[int]]:
    """Copied together: one, one, two, four, ... up to `most`, so that the first wait is short."""
    out: list[list[int]] = []
    size, start = 1, 0
    while start < len(experts):
        out.append(list(experts[start : start + size]))
        start += size
        size = min(most, max(1, start))
    return out


class Trellises:
    """Device addresses of an expert's three trellises, host experts through the staging buffers.

    Ask for experts in ascending order, each once, and call `done` after its last read is enqueued.
    """

    def __init__(
        self,
        lib: ctypes.CDLL,
        table: ExpertTable,
        touched: list[int],
        device: torch.device,
        fill: torch.Tensor | None = None,
    ):
        self.lib = lib
        wanted = [0] * table.experts if fill is None else fill.tolist()
        self.kept = {e: wanted[e] for e in touched if wanted[e] > 0}
        here = table.addresses.cpu()
        if missing := [e for e in touched if (here[e] == 0).any()]:
            raise ValueError(
                f"{len(missing)} picked experts are not here (address 0), the first is {missing[0]}"
            )
        self.rows: list[list[int]] = here[:, :, 0].tolist()
        self.sizes = [int(table.hidden_size * table.intermediate_size * b) // 8 for b in table.bits]
        begin, end = table.host_range
        host = [e for e in touched if begin <= self.rows[e][0] < end]
        self.batches = batches(host, launch.PREFILL_BATCH)
        self.place = {
            e: (b, i) for b, batch in enumerate(self.batches) for i, e in enumerate(batch)
        }
        self.copied_bytes = sum(self.sizes) * len(host)
        self.work = torch.cuda.current_stream(device)
        self.staging = _staging_for(device, sum(self.sizes)) if host else None
        if self.staging is not None:
            # What an earlier call still reads from the buffers, this stream has ordered before.
            self.staging.stream.wait_stream(self.work)
        for batch in range(min(2, len(self.batches))):
            self._copy(batch)

    def _copy(self, batch: int) -> None:
        assert self.staging is not None
        s, side = self.staging, batch % 2
        if batch >= 2:
            s.stream.wait_event(s.read[side])
        stream = s.stream.cuda_stream
        for i, expert in enumerate(self.batches[batch]):
            to = self._target(expert, side, i)
            for source, size in self._pieces(expert):
                code = self.lib.experts_copy(to, source, size, stream)
                cuda.check(self.lib, code, f"copy of {size:,} bytes of expert {expert}")
                to += size
        s.filled[side].record(s.stream)

    def _pieces(self, expert: int) -> list[tuple[int, int]]:
        """(address, bytes) of its trellises: one piece where they lie behind each other."""
        gate, up, down = self.rows[expert]
        a, b, c = self.sizes
        if (up, down) == (gate + a, gate + a + b):
            return [(gate, a + b + c)]
        return [(gate, a), (up, b), (down, c)]

    def _target(self, expert: int, side: int, i: int) -> int:
        """Where host expert `expert` is copied: to where it is to be kept, else to the buffer."""
        assert self.staging is not None
        block = self.staging.buffers[side].data_ptr() + i * self.staging.block_bytes
        return self.kept.get(expert, block)

    def keep(self) -> None:
        """Experts that were read where they are, to where they are to be kept as well."""
        for expert in self.kept.keys() - self.place.keys():
            to = self.kept[expert]
            for source, size in self._pieces(expert):
                code = self.lib.experts_copy(to, source, size, self.work.cuda_stream)
                cuda.check(self.lib, code, f"copy of {size:,} bytes of expert {expert}")
                to += size

    def of(self, expert: int) -> list[int]:
        where = self.place.get(expert)
        if where is None:
            return self.rows[expert]
        assert self.staging is not None
        batch, i = where
        if i == 0:
            self.work.wait_event(self.staging.filled[batch % 2])
        at = self._target(expert, batch % 2, i)
        return [at, at + self.sizes[0], at + self.sizes[0] + self.sizes[1]]

    def done(self, expert: int) -> None:
        where = self.place.get(expert)
        if where is None or where[1] + 1 < len(self.batches[where[0]]):
            return
        assert self.staging is not None
        batch = where[0]
        self.staging.read[batch % 2].record(self.work)
        if batch + 2 < len(self.batches):
            self._copy(batch + 2)


@dataclass(frozen=True)
class Piece:
    """`rows` picks of one expert, from row `at` of its group."""

    expert: int
    at: int
    rows: int


def groups(counts: Sequence[int], limit: int) -> list[list[Piece]]:
    """Picks sorted by expert, cut into groups of at most `limit` rows."""
    out: list[list[Piece]] = []
    room = 0
    for expert, count in enumerate(counts):
        while count:
            if room == 0:
                out.append([])
                room = limit
            rows = min(count, room)
            out[-1].append(Piece(expert, limit - room, rows))
            room -= rows
            count -= rows
    return out


class Scratch:
    """Inputs, products and dense weights of one group, in scratch that the next one reuses."""

    def __init__(
        self, lib: ctypes.CDLL, call: Prefill, rows: int, table: ExpertTable, device: torch.device
    ) -> None:
        hidden, inner = table.hidden_size, table.intermediate_size
        self.lib, self.call, self.table = lib, call, table
        self.stream = torch.cuda.current_stream(device).cuda_stream
        half: dict[str, Any] = {"dtype": torch.float16, "device": device}
        self.inputs = [torch.empty(rows, d, **half) for d in (hidden, hidden, inner)]
        self.outputs = [
            torch.empty(rows, d, dtype=torch.float32, device=device) for d in (inner, inner, hidden)
        ]
        call.input_gate, call.input_up, call.act = (t.data_ptr() for t in self.inputs)
        call.gate, call.up, call.y = (t.data_ptr() for t in self.outputs)
        shapes = ((hidden, inner), (hidden, inner), (inner, hidden))
        self.dense = [torch.empty(s, **half) for s in shapes]
        self.dense_at = (_P * 3)(*(t.data_ptr() for t in self.dense))
        self.bits8 = (_I * 3)(*(int(8 * bits) for bits in table.bits))
        self.codebook = cuda.CODEBOOKS[table.codebook]

    def weights(self, addresses: list[int]) -> None:
        """The three matrices of the next expert, dense."""
        code = self.lib.experts_reconstruct_expert(
            *((_P * 3)(*addresses), self.dense_at, self.table.hidden_size),
            *(self.table.intermediate_size, self.bits8, self.codebook, self.stream),
        )
        cuda.check(self.lib, code, "reconstruct an expert")

    def through(self, piece: Piece) -> None:
        """The piece's rows through the expert whose weights are dense now."""
        rows = slice(piece.at, piece.at + piece.rows)
        self._product(0, rows)
        self._product(1, rows)
        self.call.at, self.call.rows = piece.at, piece.rows
        self.step(ACTIVATE)
        self._product(2, rows)

    def step(self, which: int) -> None:
        code = self.lib.experts_prefill(ctypes.byref(self.call), which, self.stream)
        cuda.check(self.lib, code, "prefill")

    def _product(self, projection: int, rows: slice) -> None:
        left, out = self.inputs[projection][rows], self.outputs[projection][rows]
        torch.ops.aten.mm.dtype_out(left, self.dense[projection], torch.float32, out=out)


def prefill(
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
    """`ops.experts` for any number of tokens; made for many. Arguments are checked in ops.

    ValueError on a pick of an expert that is not here. CudaError while a graph is captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise cuda.CudaError(
            f"{len(x)} rows of {topk_ids.shape[1]} picks in a CUDA graph: only {launch.MAX_TOKENS} "
            f"rows and {launch.MAX_PICKS} picks can be captured. Try: smaller capture sizes"
        )
    x, topk_weights, topk_ids = (t.contiguous() for t in (x, topk_weights, topk_ids))
    lib = cuda.library_for(x.device)
    flat = topk_ids.flatten().long()
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=x.device)
    tally = torch.zeros(table.experts + 1, dtype=torch.int64, device=x.device)
    tally.scatter_add_(0, flat + 1, torch.ones_like(flat))
    first, *counts = tally.tolist()  # waits: routing decides what is copied and multiplied
    touched = [e for e, count in enumerate(counts) if count]
    trellises = Trellises(lib, table, touched, x.device, fill)
    if counters is not None:
        counters.picks.add_(tally[1:])
        counters.reads[0] += trellises.copied_bytes
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    call = Prefill(
        table=table.addresses.data_ptr(),
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        x=x.data_ptr(),
        out=out.data_ptr(),
        order=order.data_ptr(),
        place=place.data_ptr(),
        ids_are_64=topk_ids.dtype == torch.int64,
        dtype=cuda.DTYPES[x.dtype],
        tokens=len(x),
        top_k=topk_ids.shape[1],
        experts=table.experts,
        hidden=table.hidden_size,
        intermediate=table.intermediate_size,
        weight_on_input=weight_on_input,
        swiglu_limit=-1.0 if swiglu_limit is None else swiglu_limit,
    )
    work = groups(counts, launch.PREFILL_ROWS)
    scratch = Scratch(lib, call, min(sum(counts), launch.PREFILL_ROWS), table, x.device)
    dense = None
    for group in work:
        call.first, call.group_rows = first, sum(piece.rows for piece in group)
        scratch.step(GATHER)
        for piece in group:
            if piece.expert != dense:
                scratch.weights(trellises.of(piece.expert))
                trellises.done(piece.expert)
                dense = piece.expert
            scratch.through(piece)
        scratch.step(ADD)
        first += call.group_rows
    if fill is not None:
        trellises.keep()
        fill.copy_(torch.where((tally[1:] > 0) & (fill > 0), -fill, fill))
    return out.to(x.dtype)
