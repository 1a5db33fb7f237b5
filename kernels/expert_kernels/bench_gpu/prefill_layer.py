"""8,192 tokens over a layer with 115 of 384 experts on the host, against its slower part."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import torch

from expert_kernels import cuda, interface, launch, prefill, prefill_group
from expert_kernels.bench_gpu.timing import SHAPES, Facts, alone, median_us, of_one
from expert_kernels.staging import Trellises
from expert_kernels.synthetic import RandomExperts, routing

TOKENS, COUNT, HOSTS, TOP_K = 8192, 384, 115, 6


def measure(repeats: int) -> Iterator[Facts]:
    """The copy alone is the same copies in the same batches with nothing else on the device."""
    yield {
        "predicted": {"ratio": 1.03, "copy_alone_ms": 28.0, "compute_alone_ms": 16.0},
        "bar": 1.05,
    }
    shape, repeats = SHAPES[0], max(3, repeats // 10)
    experts = RandomExperts(COUNT, shape)
    x = torch.randn(TOKENS, shape.hidden, device="cuda").bfloat16()
    weights, ids = routing(TOKENS, TOP_K, COUNT)
    on_host = sorted(range(0, COUNT, COUNT // HOSTS))[:HOSTS]
    tables = {"mixed": experts.table(on_host), "compute": experts.table()}
    rows = tables["mixed"].addresses[:, :, 0].tolist()
    lib = interface.library_for(x.device)

    def copies() -> None:
        made = Trellises(lib, tables["mixed"], on_host, rows, [0] * COUNT)
        for batch in range(len(made.batches)):
            made.wait_for(batch)
            made.release(batch)
        made.caller.wait_stream(made.urgent)

    times = {
        name: median_us(lambda t=table: prefill.prefill(x, weights, ids, t), repeats) / 1e3  # type: ignore[misc]
        for name, table in tables.items()
    }
    copy = median_us(copies, repeats) / 1e3
    ways = _ways(lambda: prefill.prefill(x, weights, ids, tables["mixed"]), repeats)
    when = [_when(lambda: prefill.prefill(x, weights, ids, tables["mixed"])) for _ in range(3)]
    moved = len(on_host) * shape.expert_bytes
    yield {
        "ms": times["mixed"],
        "copy_alone_ms": copy,
        "compute_alone_ms": times["compute"],
        "ratio": times["mixed"] / max(copy, times["compute"]),
        "copied_bytes": moved,
        "copy_bytes_a_second": moved / copy * 1e3,
        "when_ms": when[-1],
    }
    yield from ways
    yield from _one_expert(experts)


def _when(call: Callable[[], object]) -> Facts:
    """Of one call: when the first copy began and the last ended, and how long they took in sum."""
    copy, marks = Trellises._copy_expert, [torch.cuda.Event(enable_timing=True)]

    def noted(self: Trellises, expert: int, to: int, stream: int) -> None:
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record(torch.cuda.ExternalStream(stream))
        copy(self, expert, to, stream)
        pair[1].record(torch.cuda.ExternalStream(stream))
        marks.extend(pair)

    torch.cuda.synchronize()
    Trellises._copy_expert = noted  # type: ignore[method-assign]
    try:
        marks[0].record()
        call()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        torch.cuda.synchronize()
    finally:
        Trellises._copy_expert = copy  # type: ignore[method-assign]
    at = [marks[0].elapsed_time(mark) for mark in marks]
    copies = list(zip(at[1:-1:2], at[2:-1:2], strict=True))
    return {
        "first_copy": copies[0][0],
        "last_copy_ends": copies[-1][1],
        "copies_in_sum": sum(end - begin for begin, end in copies),
        "longest_wait_between": max(b[0] - a[1] for a, b in itertools.pairwise(copies)),
        "call": at[-1],
    }


def _ways(call: Callable[[], object], repeats: int) -> list[Facts]:
    """Slots, batches, window; also with nothing copied, which is what the launches cost."""
    usual = launch.PREFILL_SLOTS, launch.PREFILL_BATCH, launch.PREFILL_WINDOW
    copy, out = Trellises._copy_expert, []
    try:
        ways = (
            (16, 4, 2),
            (24, 4, 1),
            (24, 4, 2),
            (24, 8, 1),
            (24, 8, 2),
            (24, 8, 3),
            (32, 8, 2),
        )
        for slots, batch, window in ways:
            launch.PREFILL_SLOTS, launch.PREFILL_BATCH, launch.PREFILL_WINDOW = slots, batch, window
            facts: Facts = {"slots": slots, "batch": batch, "window": window}
            facts["ms"] = median_us(call, repeats) / 1e3
            Trellises._copy_expert = lambda *_: None  # type: ignore[method-assign]
            facts["nothing_copied_ms"] = median_us(call, repeats) / 1e3
            Trellises._copy_expert = copy  # type: ignore[method-assign]
            out.append(facts)
    finally:
        launch.PREFILL_SLOTS, launch.PREFILL_BATCH, launch.PREFILL_WINDOW = usual
        Trellises._copy_expert = copy  # type: ignore[method-assign]
    return out


def _one_expert(experts: RandomExperts) -> Iterator[Facts]:
    """Eight experts of so many rows each, fused against dense, with what calling costs."""
    usual = launch.DENSE_ROWS
    try:
        for rows in (64, 128, 256, 512, 1024, 2048):
            x = torch.randn(8 * rows, experts.shape.hidden, device="cuda").half()
            weights, ids = routing(8 * rows, 1, 8)
            ids = torch.arange(8, device="cuda", dtype=torch.int32).repeat_interleave(rows)[:, None]
            table = experts.table()
            facts: Facts = {"experts": 8, "rows": rows}
            for name, limit in (("fused", 1 << 30), ("dense", 1)):
                launch.DENSE_ROWS = limit
                us = median_us(lambda: prefill.prefill(x, weights, ids, table), 10)  # noqa: B023
                facts[f"{name}_us_an_expert"] = us / 8
            yield facts
    finally:
        launch.DENSE_ROWS = usual
    yield {"pieces_of_8_experts_us": dict(_pieces(experts))}


def _pieces(experts: RandomExperts) -> Iterator[tuple[str, float]]:
    """On the device alone: what fused products of 8 x 128 rows take, and one dense matrix."""
    shape, table, rows = experts.shape, experts.table(), 128
    device = table.addresses.device
    x = torch.randn(8 * rows, shape.hidden, device="cuda").half()
    order = torch.arange(8 * rows, device="cuda")
    ids = torch.arange(8, device="cuda", dtype=torch.int32).repeat_interleave(rows)
    weights = torch.rand(8 * rows, device="cuda")
    out = torch.zeros(8 * rows, shape.hidden, device="cuda")
    call = interface.Prefill(
        table=table.addresses.data_ptr(),
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        x=x.data_ptr(),
        out=out.data_ptr(),
        order=order.data_ptr(),
        place=order.data_ptr(),
        dtype=interface.DTYPES[x.dtype],
        tokens=8 * rows,
        top_k=1,
        experts=table.experts,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        swiglu_limit=-1.0,
        group_rows=8 * rows,
    )
    words = [
        w for e in range(8) for w in (*table.addresses[e, :, 0].tolist(), e, rows * e | rows << 32)
    ]
    pieces = torch.tensor(words, dtype=torch.int64, device="cuda")

    kept = prefill_group.Group(interface.library_for(device), call, 8 * rows, table, device)

    yield "fused, 8 x 128 rows", of_one(lambda: kept.fused(pieces.data_ptr(), 8), 4)
    k, n = shape.linear(0)
    dense = torch.empty(k, n, dtype=torch.float16, device="cuda")
    address = int(table.addresses[0, 0, 0])
    yield "reconstruct one", of_one(lambda: cuda.reconstruct(address, k, n, 3.0, "mcg", dense))
    left = torch.randn(rows, k, device="cuda").half()
    y = torch.empty(rows, n, dtype=torch.float32, device="cuda")
    product = torch.ops.aten.mm.dtype_out
    yield "cuBLAS, 128 rows", of_one(lambda: product(left, dense, torch.float32, out=y))


if __name__ == "__main__":
    sys.exit(alone(measure, "expert_kernels.bench_gpu.prefill_layer", __doc__))
