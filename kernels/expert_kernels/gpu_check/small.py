"""Every kernel once on little: what compute-sanitizer runs, which slows a kernel a thousandfold.

compute-sanitizer --tool racecheck python -m expert_kernels.gpu_check --child --only small
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from expert_kernels import cuda, lookup, ops
from expert_kernels.gpu_check.compare import Facts, expected_outputs, inputs, relative_error
from expert_kernels.gpu_check.rows import random_rows
from expert_kernels.gpu_check.write_through import Slots
from expert_kernels.synthetic import RandomExperts, Shape, random_matrix, roomy, routing

# The smallest at which a warp's walk through gate and up or through down is longer than its ring.
SHAPE = Shape(640, 1152)
FEW_BLOCKS = {"blocks": 24, "host_blocks": 8}


def small() -> Iterator[Facts]:
    """The float64 reference is worked out once: a call's tokens are always the first ones."""
    experts = RandomExperts(3, SHAPE)
    x, (weights, ids) = inputs(70, SHAPE.hidden, torch.float16, 1), routing(70, 2, 3, seed=1)
    expected = experts.expected(x, weights, ids)
    yield from _decode(experts, x, weights, ids, expected)
    error = relative_error(ops.experts(x, weights, ids, experts.table({1})), expected)
    yield {"ok": error <= 1e-3, "prefill": len(x), "error": error}
    yield from _lookups()
    yield from _matrices()


def _decode(
    experts: RandomExperts,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expected: torch.Tensor,
) -> Iterator[Facts]:
    """1, 2, 4, 8 groups of rows, k whole and in parts, two homes, experts stored as they pass."""
    table, slots = experts.table({1, 2}), Slots(experts, 3)
    roomy(SHAPE, 2)
    work = cuda.scratch(x.device, SHAPE.hidden, SHAPE.intermediate, 2)
    for tokens, parts in ((1, 2), (8, 1), (9, 1), (17, 1), (33, 1)):
        fill = torch.tensor([0, slots.address(1), slots.address(2)], device="cuda")
        chosen = dataclasses.replace(
            work.launch_for(tokens), split_a=parts, split_b=parts, **FEW_BLOCKS
        )
        picked = ids[:tokens]
        out = cuda.decode(x[:tokens], weights[:tokens], picked, table, fill=fill, chosen=chosen)
        error = relative_error(out, expected[:tokens])
        stored = all(slots.holds(e, e) for e in (1, 2) if (picked == e).any())
        yield {"ok": error <= 1e-3 and stored, "tokens": tokens, "parts": parts, "error": error}
        slots.memory.zero_()


def _matrices() -> Iterator[Facts]:
    """8, 16 and 32 rows in place; 33 through reconstructed weights."""
    matrices = [random_matrix(512, 256, 3.0, "mcg"), random_matrix(512, 128, 4.0, "mcg", 5)]
    x = inputs(33, 512, torch.float16, 2)
    expected = expected_outputs(x, matrices)
    for rows in (1, 9, 17, 33):
        error = relative_error(ops.linear(x[:rows], matrices), expected[:rows])
        yield {"ok": error <= 1e-3, "rows": rows, "error": error}


def _lookups() -> Iterator[Facts]:
    for format in lookup.ROW_BYTES:
        stored_rows = random_rows(100, format)
        home = stored_rows.pin_memory()
        ids = torch.randint(0, 100, (130,), device="cuda")
        out = lookup.lookup(ids, lookup.RowTable(home.data_ptr(), 100, format), torch.float32)
        yield {
            "ok": torch.equal(out, lookup.unpack(stored_rows, format).cuda()[ids]),
            "format": format,
        }
