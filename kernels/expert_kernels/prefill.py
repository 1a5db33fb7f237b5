"""Many tokens through a routed layer on a GPU.

Picks are sorted by expert and go by in groups of a few thousand rows. A group's experts in device
memory are multiplied a group ahead, all in one launch, on the caller's stream; the host's, which
the copy engine brings meanwhile (staging.py), a launch for each batch on a stream that goes before
it. What is multiplied when never changes a bit of the result, because every product has one order
of its own and a token's picks are added in ascending order of expert.
An expert with few rows has its weights decoded on their way into the matrix units; one with many
becomes dense and goes through cuBLAS.

Routing is read by the host once a layer, so a call cannot be captured in a graph.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from expert_kernels import interface, launch
from expert_kernels.prefill_group import ADD, GATHER, Group
from expert_kernels.prefill_schedule import Run, groups, runs, steps
from expert_kernels.staging import Trellises

if TYPE_CHECKING:
    from expert_kernels.cuda import DeviceCounters
    from expert_kernels.ops import ExpertTable

_PIECE_WORDS = 5  # int64 of an ExpertsPiece: three trellises, expert, at and rows


class Routed:
    """What the host knows of a call: picks by expert, and the table's numbers as they are now."""

    def __init__(self, ids: torch.Tensor, table: ExpertTable, fill: torch.Tensor | None) -> None:
        count, addresses = table.experts, table.addresses
        self.tally = torch.zeros(count + 1, dtype=torch.int64, device=ids.device)
        self.tally.scatter_add_(0, ids + 1, torch.ones_like(ids))
        parts = (self.tally, addresses.flatten(), *([] if fill is None else [fill]))
        said = torch.cat(parts).cpu()  # waits: routing decides what is copied and multiplied
        self.not_ours, *self.counts = said[: count + 1].tolist()
        numbers = said[count + 1 : 10 * count + 1].view(count, 3, 3)
        self.rows = numbers[:, :, 0].tolist()
        self.kept = [0] * count if fill is None else said[10 * count + 1 :].tolist()
        self.touched = [e for e, picks in enumerate(self.counts) if picks]
        missing = (numbers == 0).flatten(1).any(1).tolist()
        if gone := [e for e in self.touched if missing[e]]:
            raise ValueError(
                f"{len(gone)} picked experts are not here (address 0), the first is {gone[0]}"
            )


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
        raise interface.CudaError(
            f"{len(x)} rows of {topk_ids.shape[1]} picks in a CUDA graph: only {launch.MAX_TOKENS} "
            f"rows and {launch.MAX_PICKS} picks can be captured. Try: smaller capture sizes"
        )
    x, topk_weights, topk_ids = (t.contiguous() for t in (x, topk_weights, topk_ids))
    lib = interface.library_for(x.device)
    flat = topk_ids.flatten().long()
    routed = Routed(flat, table, fill)
    trellises = Trellises(lib, table, routed.touched, routed.rows, routed.kept)
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=x.device)
    if counters is not None:
        counters.picks.add_(routed.tally[1:])
        counters.reads[0] += trellises.copied_bytes
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    call = interface.Prefill(
        table=table.addresses.data_ptr(),
        ids=topk_ids.data_ptr(),
        weights=topk_weights.data_ptr(),
        x=x.data_ptr(),
        out=out.data_ptr(),
        order=order.data_ptr(),
        place=place.data_ptr(),
        first=routed.not_ours,
        ids_are_64=topk_ids.dtype == torch.int64,
        dtype=interface.DTYPES[x.dtype],
        tokens=len(x),
        top_k=topk_ids.shape[1],
        experts=table.experts,
        hidden=table.hidden_size,
        intermediate=table.intermediate_size,
        weight_on_input=weight_on_input,
        swiglu_limit=-1.0 if swiglu_limit is None else swiglu_limit,
    )
    rows = min(sum(routed.counts), launch.PREFILL_ROWS)
    window = min(launch.PREFILL_WINDOW, -(-sum(routed.counts) // launch.PREFILL_ROWS))
    if rows:
        _multiply(Group(lib, call, rows, table, x.device, window), trellises, routed)
    if fill is not None:
        trellises.keep()
        fill.copy_(torch.where((routed.tally[1:] > 0) & (fill > 0), -fill, fill))
    return out.to(x.dtype)


def _multiply(scratch: Group, trellises: Trellises, routed: Routed) -> None:
    """Every group's rows through their experts, added to the output."""
    work = groups(routed.counts, launch.PREFILL_ROWS)
    ends = {
        trellises.batch_of[p.expert]: p for g in work for p in g if p.expert in trellises.batch_of
    }
    planned = [runs(group, trellises.batch_of, ends) for group in work]
    fused = [piece for made in planned for run in made if not run.dense for piece in run.pieces]
    words = [
        word for p in fused for word in (*trellises.of(p.expert), p.expert, p.at | p.rows << 32)
    ]
    pieces = torch.tensor(words, dtype=torch.int64, device=routed.tally.device)
    counts = [0 if run.dense else len(run.pieces) for made in planned for run in made]
    starts = iter(itertools.accumulate(counts, initial=0))
    launches = [[(run, next(starts)) for run in made] for made in planned]
    trellises.copy_ahead(len(trellises.batches))
    caller, urgent = trellises.caller, trellises.urgent
    urgent.wait_stream(caller)
    gathered, multiplied, added = ([torch.cuda.Event() for _ in work] for _ in range(3))
    for index, on_host in steps(len(work), scratch.window):
        scratch.use(index, sum(piece.rows for piece in work[index]))
        with torch.cuda.stream(urgent if on_host else caller):
            if on_host:
                urgent.wait_event(gathered[index])
            else:
                if index >= scratch.window:
                    caller.wait_event(added[index - scratch.window])
                scratch.step(GATHER)
                gathered[index].record()
            for run, start in launches[index]:
                if (run.batch is not None) == on_host:
                    at = pieces.data_ptr() + 8 * _PIECE_WORDS * start
                    _launch(run, at, scratch, trellises)
            if on_host:
                urgent.wait_event(multiplied[index])
                scratch.step(ADD)
                added[index].record()
            else:
                multiplied[index].record()
    caller.wait_stream(urgent)


def _launch(run: Run, pieces_at: int, scratch: Group, trellises: Trellises) -> None:
    """A run on the current stream, after its batch is here."""
    if run.batch is not None:
        trellises.wait_for(run.batch)
    if run.dense:
        scratch.through_dense(run.pieces[0], trellises.of(run.pieces[0].expert))
    else:
        scratch.fused(pieces_at, len(run.pieces))
    if run.last and run.batch is not None:
        trellises.release(run.batch)
