"""Many tokens through a routed layer on a GPU: weights become dense, cuBLAS multiplies.

Experts go by in ascending order, whatever their home. Those on the host are copied in batches to
two buffers by the copy engine, the next batch under the products of this one, and from there they
are read like any other: the same bits whatever the home. Routing is read by the host once a layer,
so a call cannot be captured in a graph.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

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
        *((name, _P) for name in ("table", "ids", "weights", "x", "out", "order")),
        *((name, _P) for name in ("input_gate", "input_up", "gate", "up", "act", "y")),
        ("first", ctypes.c_int64),
        *((name, _I) for name in ("ids_are_64", "dtype", "top_k", "rows")),
        *((name, _I) for name in ("hidden", "intermediate", "weight_on_input")),
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


def _staging_for(device: torch.device, block_bytes: int) -> Staging:
    key = (torch.cuda.current_device() if device.index is None else device.index, block_bytes)
    if key not in _staging:
        _staging[key] = Staging(device, block_bytes)
    return _staging[key]


class Trellises:
    """Device addresses of an expert's three trellises, host experts through the staging buffers.

    Ask for experts in ascending order, each once, and call `done` after its last read is enqueued.
    """

    def __init__(
        self, lib: ctypes.CDLL, table: ExpertTable, touched: list[int], device: torch.device
    ):
        self.lib = lib
        here = table.addresses.cpu()
        if missing := [e for e in touched if (here[e] == 0).any()]:
            raise ValueError(
                f"{len(missing)} picked experts are not here (address 0), the first is {missing[0]}"
            )
        self.rows: list[list[int]] = here[:, :, 0].tolist()
        self.sizes = [int(table.hidden_size * table.intermediate_size * b) // 8 for b in table.bits]
        begin, end = table.host_range
        host = [e for e in touched if begin <= self.rows[e][0] < end]
        step = launch.PREFILL_BATCH
        self.batches = [host[i : i + step] for i in range(0, len(host), step)]
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
        for i, expert in enumerate(self.batches[batch]):
            to = s.buffers[side].data_ptr() + i * s.block_bytes
            for source, size in zip(self.rows[expert], self.sizes, strict=True):
                code = self.lib.experts_copy(to, source, size, s.stream.cuda_stream)
                cuda.check(self.lib, code, f"copy of {size:,} bytes of expert {expert}")
                to += size
        s.filled[side].record(s.stream)

    def of(self, expert: int) -> list[int]:
        where = self.place.get(expert)
        if where is None:
            return self.rows[expert]
        assert self.staging is not None
        batch, i = where
        if i == 0:
            self.work.wait_event(self.staging.filled[batch % 2])
        at = self.staging.buffers[batch % 2].data_ptr() + i * self.staging.block_bytes
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


class Rows:
    """One call's rows, expert by expert, in scratch that is reused."""

    def __init__(
        self, lib: ctypes.CDLL, call: Prefill, most: int, table: ExpertTable, device: torch.device
    ) -> None:
        hidden, inner = table.hidden_size, table.intermediate_size
        self.lib, self.call, self.table = lib, call, table
        self.stream = torch.cuda.current_stream(device).cuda_stream

        def scratch(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(min(most, launch.PREFILL_ROWS), columns, dtype=dtype, device=device)

        self.inputs = [scratch(d, torch.float16) for d in (hidden, hidden, inner)]
        self.outputs = [scratch(d, torch.float32) for d in (inner, inner, hidden)]
        call.input_gate, call.input_up, call.act = (t.data_ptr() for t in self.inputs)
        call.gate, call.up, call.y = (t.data_ptr() for t in self.outputs)
        shapes = ((hidden, inner), (hidden, inner), (inner, hidden))
        self.dense = [torch.empty(s, dtype=torch.float16, device=device) for s in shapes]

    def weights(self, addresses: list[int]) -> None:
        """The three matrices of the next expert, dense."""
        for address, dense, bits in zip(addresses, self.dense, self.table.bits, strict=True):
            cuda.reconstruct(address, *dense.shape, bits, self.table.codebook, dense)

    def through(self, first: int, rows: int) -> None:
        """Picks [first, first + rows) of the sorted picks through that expert."""
        for start in range(0, rows, launch.PREFILL_ROWS):
            self.call.first = first + start
            self.call.rows = count = min(launch.PREFILL_ROWS, rows - start)
            self._step(GATHER)
            self._product(0, count)
            self._product(1, count)
            self._step(ACTIVATE)
            self._product(2, count)
            self._step(ADD)

    def _step(self, which: int) -> None:
        code = self.lib.experts_prefill(ctypes.byref(self.call), which, self.stream)
        cuda.check(self.lib, code, "prefill")

    def _product(self, projection: int, rows: int) -> None:
        left, out = self.inputs[projection][:rows], self.outputs[projection][:rows]
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
) -> torch.Tensor:
    """`ops.experts` for any number of tokens; made for many. Arguments are checked in ops.

    ValueError on a pick of an expert that is not here.
    """
    x, topk_weights, topk_ids = (t.contiguous() for t in (x, topk_weights, topk_ids))
    lib = cuda.library_for(x.device)
    flat = topk_ids.flatten().long()
    order = flat.argsort(stable=True)
    tally = torch.zeros(table.experts + 1, dtype=torch.int64, device=x.device)
    tally.scatter_add_(0, flat + 1, torch.ones_like(flat))
    first, *counts = tally.tolist()  # waits: routing decides what is copied and multiplied
    touched = [e for e, count in enumerate(counts) if count]
    trellises = Trellises(lib, table, touched, x.device)
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
        ids_are_64=topk_ids.dtype == torch.int64,
        dtype=cuda.DTYPES[x.dtype],
        top_k=topk_ids.shape[1],
        hidden=table.hidden_size,
        intermediate=table.intermediate_size,
        weight_on_input=weight_on_input,
        swiglu_limit=-1.0 if swiglu_limit is None else swiglu_limit,
    )
    rows = Rows(lib, call, max(counts, default=0), table, x.device)
    for expert in touched:
        rows.weights(trellises.of(expert))
        trellises.done(expert)
        rows.through(first, counts[expert])
        first += counts[expert]
    return out.to(x.dtype)
