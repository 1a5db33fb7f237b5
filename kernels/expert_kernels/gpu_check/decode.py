"""Few tokens: formats, rows, shapes and odd picks, weights read in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from expert_kernels import codec, cuda, ops
from expert_kernels.gpu_check.compare import TOLERANCE, Facts, compare, inputs
from expert_kernels.synthetic import RandomExperts, Shape, roomy, routing


def formats() -> Iterator[Facts]:
    """Every K and codebook, the same in all projections and mixed."""
    for codebook in codec.CODEBOOKS:
        halves = codec.HALF_BITS if codebook == "mul1" else ()
        mixed = [(2.0, 4.0, 3.0), (8.0, 1.0, 5.0)]
        for bits in [*((b, b, b) for b in (*codec.WHOLE_BITS, *halves)), *mixed]:
            experts = RandomExperts(6, Shape(512, 384, bits=bits, codebook=codebook))
            for tokens in (1, 8, 20):
                facts = compare(experts, tokens, 3, torch.float16, seed=tokens)
                yield {"codebook": codebook, "bits": bits, **facts}


def rows() -> Iterator[Facts]:
    """Rows an expert from 1 to 64, dtypes, limit, weight on the input."""
    experts = RandomExperts(4, Shape(512, 384))
    for tokens in (1, 2, 4, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64):
        for top_k in (1, 4):  # with 4 of 4 every expert has every row
            for dtype in TOLERANCE:
                yield compare(experts, tokens, top_k, dtype, seed=tokens)
        yield {"limit": 0.5, **compare(experts, tokens, 2, torch.float16, limit=0.5)}
        yield {
            "weight_on_input": True,
            **compare(experts, tokens, 1, torch.float16, weight_on_input=True),
        }


def splits() -> Iterator[Facts]:
    """Parts of k that launch.py may choose, down to a ring's length, and more than blocks."""
    for shape in (Shape(1024, 512), Shape(5120, 2304)):
        experts, usual = RandomExperts(6, shape), roomy(shape, 3)
        for split_a in (1, 2, 4, 7, 16):
            for split_b in (1, 3, 4):
                for tokens, blocks in ((1, usual.blocks), (7, usual.blocks), (3, 5)):
                    chosen = dataclasses.replace(
                        usual, split_a=split_a, split_b=split_b, blocks=blocks
                    )
                    facts = compare(experts, tokens, 3, torch.float16, seed=tokens, chosen=chosen)
                    yield {"split_a": split_a, "split_b": split_b, "blocks": blocks, **facts}


def real_shapes() -> Iterator[Facts]:
    for hidden, intermediate in ((5120, 2304), (7168, 2048), (5120, 1152), (4096, 2048)):
        experts = RandomExperts(8, Shape(hidden, intermediate))
        for tokens in (1, 4, 8, 12, 33, 64):
            facts = compare(experts, tokens, 6, torch.float16, seed=tokens)
            yield {"hidden": hidden, "intermediate": intermediate, **facts}


def odd_picks() -> Iterator[Facts]:
    """-1 adds nothing, no pick gives zeros, a pick twice counts twice, more rows than a group."""
    experts = RandomExperts(6, Shape(512, 384))
    table = experts.table({1, 2})
    x = inputs(8, 512, torch.float16, 1)
    weights, ids = routing(8, 3, 6, seed=1)
    for name, changed in {
        "some of another rank": torch.where(ids >= 3, -1, ids),
        "a token without picks": torch.where(torch.arange(8, device="cuda")[:, None] == 2, -1, ids),
        "no picks at all": torch.full_like(ids, -1),
        "one expert in every slot": torch.full_like(ids, 4),
        "int64": ids.long(),
    }.items():
        out = cuda.decode(x, weights, changed, table)
        expected = experts.expected(x, weights, changed)
        error = float((out.double() - expected).norm() / expected.norm().clamp(min=1e-9))
        yield {"ok": error <= 1e-3, "case": name, "error": error}
    missing = table.addresses.clone()
    missing[4] = 0
    gone = ops.ExpertTable(missing, 512, 384, table.bits, table.codebook, table.host_range)
    counters = cuda.DeviceCounters(
        torch.zeros(6, dtype=torch.int64, device="cuda"),
        torch.zeros(2, dtype=torch.int64, device="cuda"),
    )
    out = cuda.decode(x, weights, ids, gone, counters=counters)
    hit = (ids == 4).any(1)
    whole = cuda.decode(x, weights, ids, table)
    right = out[hit].isnan().all() and torch.equal(out[~hit], whole[~hit])
    picks = torch.bincount(ids.flatten().long(), minlength=6)
    read = sum(experts.shape.expert_bytes for e in (1, 2) if picks[e])
    counted = torch.equal(counters.picks, picks) and counters.reads.tolist() == [
        read,
        int(picks[4]),
    ]
    yield {
        "ok": bool(right) and counted,
        "case": "an expert that is not here",
        "reads": counters.reads.tolist(),
        "expected": [read, int(picks[4])],
    }
