"""Every kernel once on little: what compute-sanitizer runs, which slows a kernel a thousandfold."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from expert_kernels import lookup, ops
from expert_kernels.gpu_check.compare import Facts, expected_outputs, inputs, relative_error
from expert_kernels.gpu_check.rows import random_rows
from expert_kernels.gpu_check.write_through import Slots
from expert_kernels.synthetic import RandomExperts, Shape, random_matrix, routing


def small() -> Iterator[Facts]:
    """Decode of 1 to 33 rows with two homes and slots filled, prefill fused, matrices, lookups."""
    experts = RandomExperts(6, Shape(2048, 1024))
    table, slots = experts.table({1, 2, 4}), Slots(experts, 6)
    for tokens in (1, 9, 33, 70):
        x = inputs(tokens, 2048, torch.float16, tokens)
        weights, ids = routing(tokens, 3, 6, seed=tokens)
        fill = torch.tensor([0, *(slots.address(e) for e in range(1, 6))], device="cuda")
        out = ops.experts(x, weights, ids, table, fill=fill)
        error = relative_error(out, experts.expected(x, weights, ids))
        stored = all(slots.holds(e, e) for e in range(1, 6) if (ids == e).any())
        yield {"ok": error <= 1e-3 and stored, "tokens": tokens, "error": error}
        slots.memory.zero_()
    matrices = [random_matrix(1024, 256, 3.0, "mcg"), random_matrix(1024, 128, 4.0, "mcg", 5)]
    for rows in (1, 9, 17, 33):
        x = inputs(rows, 1024, torch.float16, rows)
        error = relative_error(ops.linear(x, matrices), expected_outputs(x, matrices))
        yield {"ok": error <= 1e-3, "rows": rows, "error": error}
    for format in lookup.ROW_BYTES:
        stored_rows = random_rows(100, format)
        home = stored_rows.pin_memory()
        ids = torch.randint(0, 100, (130,), device="cuda")
        out = lookup.lookup(ids, lookup.RowTable(home.data_ptr(), 100, format), torch.float32)
        yield {
            "ok": torch.equal(out, lookup.unpack(stored_rows, format).cuda()[ids]),
            "format": format,
        }
