"""Experts stored where they are to be kept while they are read: whole, once, also in use."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch

from expert_kernels import cuda, ops
from expert_kernels.gpu_check.compare import Facts, inputs
from expert_kernels.synthetic import RandomExperts, Shape, routing


class Slots:
    """Blocks of device memory for one expert each, and the bytes that an expert has."""

    def __init__(self, experts: RandomExperts, count: int) -> None:
        self.experts, self.size = experts, experts.shape.expert_bytes
        self.memory = torch.zeros(
            count, experts.shape.block_bytes, dtype=torch.uint8, device="cuda"
        )

    def address(self, slot: int) -> int:
        return self.memory[slot].data_ptr()

    def holds(self, slot: int, expert: int) -> bool:
        parts = [self.experts.trellis(expert, p).view(torch.uint8).flatten() for p in range(3)]
        return torch.equal(self.memory[slot, : self.size], torch.cat(parts))

    def row(self, slot: int, expert: int) -> torch.Tensor:
        """int64 [3, 3]: the table's numbers of `expert` in this slot."""
        row = self.experts.rows(())[expert].clone()
        at = self.address(slot)
        for p in range(3):
            row[p, 0] = at
            at += self.experts.shape.trellis_bytes(p)
        return row


def write_through() -> Iterator[Facts]:
    """Every kernel that reads: few rows, more rows than a group, many; formats; both homes."""
    shapes = (
        Shape(512, 384),
        Shape(512, 384, bits=(2.0, 4.0, 5.0), codebook="mul1"),
        Shape(512, 384, bits=(8.0, 1.0, 3.0)),
        Shape(),
    )
    for shape in shapes:
        count = 8
        experts = RandomExperts(count, shape)
        for tokens in (1, 7, 8, 20, 33, 64, 300):
            table = experts.table({1, 2, 3, 4, 5})
            x = inputs(tokens, shape.hidden, torch.float16, tokens)
            weights, ids = routing(tokens, 3, 6, seed=tokens)  # 6 and 7 are never picked
            ids[0, 0] = ids[0, 1]  # twice by one token
            slots = Slots(experts, count)
            wanted = [0, *(slots.address(e) for e in range(1, count))]
            wanted[5] = -slots.address(5)  # stored before: not again
            fill = torch.tensor(wanted, device="cuda")
            plain = ops.experts(x, weights, ids, table)
            out = ops.experts(x, weights, ids, table, fill=fill)
            touched = set(ids.flatten().tolist())
            expected = [-at if e in touched and at > 0 else at for e, at in enumerate(wanted)]
            right = [
                slots.holds(e, e) if e in touched and e not in (0, 5) else not slots.memory[e].any()
                for e in range(count)
            ]
            beyond = not slots.memory[:, slots.size :].any()
            yield {
                "ok": torch.equal(out, plain)
                and fill.tolist() == expected
                and all(right)
                and beyond,
                "hidden": shape.hidden,
                "bits": shape.bits,
                "tokens": tokens,
                "same_output": torch.equal(out, plain),
                "stored": right,
            }


def promotions(steps: int, seconds: float) -> Iterator[Facts]:
    """Captured calls while misses are admitted by write-through and slots change hands at random.

    Every step: outputs equal those of device homes. What a step stored serves from its slot in the
    next; its old owner goes back to the host first.
    """
    rng = random.Random(0)
    count, spare = 24, 6
    experts = RandomExperts(count, Shape(1024, 512))
    table, still = experts.table(range(count)), experts.table()
    host_rows = experts.rows(range(count)).cuda()
    slots = Slots(experts, spare)
    slot_rows = torch.stack(
        [torch.stack([slots.row(s, e) for e in range(count)]) for s in range(spare)]
    ).cuda()
    fill = torch.zeros(count, dtype=torch.int64, device="cuda")
    cases = []
    for tokens in (1, 2, 5, 8, 13, 40):
        x = inputs(tokens, 1024, torch.bfloat16, tokens)
        routed = routing(tokens, 6, count, seed=tokens)
        expected = cuda.decode(x, *routed, still)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            out = cuda.decode(x, *routed, table, fill=fill)
        cases.append((captured, out, expected, x, routed, set(routed[1].flatten().tolist())))
    owner: list[int | None] = [None] * spare
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    unmarked = torch.zeros((), dtype=torch.int64, device="cuda")
    start, done, moved = time.perf_counter(), 0, 0
    while done < steps and time.perf_counter() - start < seconds:
        captured, out, expected, _, _, touched = rng.choice(cases)
        slot = rng.randrange(spare)
        new = rng.choice(sorted(touched - {e for e in owner if e is not None}) or [-1])
        if new >= 0:
            old = owner[slot]
            if old is not None:
                table.addresses[old] = host_rows[old]
            fill[new] = slots.address(slot)
        out.fill_(float("nan"))
        captured.replay()
        wrong += (out != expected).any()
        if new >= 0:
            unmarked += fill[new] != -slots.address(slot)
            table.addresses[new] = slot_rows[slot, new]
            fill[new] = 0
            owner[slot], moved = new, moved + 1
        done += 1
        if done % 1000 == 0:
            torch.cuda.synchronize()
    right = all(slots.holds(s, e) for s, e in enumerate(owner) if e is not None)
    yield {
        "ok": int(wrong) == 0 and int(unmarked) == 0 and right and moved > 0,
        "steps": done,
        "promotions": moved,
        "wrong": int(wrong),
        "not_stored": int(unmarked),
        "slots_right": right,
        "seconds": round(time.perf_counter() - start, 1),
    }
