"""The routed-experts op on host memory against a loop over tokens, written from its contract."""

import dataclasses

import pytest
import torch
from torch.nn.functional import silu

from expert_kernels import ops, reference

pytestmark = pytest.mark.engine

HIDDEN, INNER, EXPERTS = 256, 128, 5
BITS = (3.0, 2.0, 4.0)


class Homes:
    """Experts in memory of their own, 128-byte aligned, and the table of their addresses."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN))
        self.tensors = [
            [_linear(k, n, bits, generator) for (k, n), bits in zip(shapes, BITS, strict=True)]
            for _ in range(EXPERTS)
        ]

    def table(self, codebook: str = "mcg") -> ops.ExpertTable:
        addresses = [[[t.data_ptr() for t in p] for p in e] for e in self.tensors]
        return ops.ExpertTable(torch.tensor(addresses), HIDDEN, INNER, BITS, codebook)


def _aligned(values: torch.Tensor) -> torch.Tensor:
    room = torch.empty(values.numel() + 64, dtype=values.dtype)
    skip = -room.data_ptr() % 128 // values.element_size()
    return room[skip : skip + values.numel()].view(values.shape).copy_(values)


def _linear(k: int, n: int, bits: float, generator: torch.Generator) -> list[torch.Tensor]:
    shape = (k // 16, n // 16, int(16 * bits))
    trellis = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)
    scales = [torch.randn(d, generator=generator).half() / d**0.5 for d in (k, n)]
    return [_aligned(trellis), *map(_aligned, scales)]


def _routing(tokens: int, top_k: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    picks = [torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)]
    return x, torch.rand(tokens, top_k, generator=generator), torch.stack(picks)


def _loop(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, homes: Homes, limit: float | None
) -> torch.Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, (w_row, id_row) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        for weight, expert in zip(w_row, id_row, strict=True):
            if expert == -1:
                continue
            gate, up, down = (
                reference.dequantise(*p, "mcg", torch.float64) for p in homes.tensors[expert]
            )
            g, u = x[token].double() @ gate, x[token].double() @ up
            if limit is not None:
                g, u = g.clamp(max=limit), u.clamp(min=-limit, max=limit)
            out[token] += weight * ((silu(g) * u) @ down)
    return out


@pytest.mark.parametrize("limit", [None, 0.05])
def test_experts_are_the_weighted_sum_over_each_tokens_picks(limit: float | None) -> None:
    homes = Homes()
    x, weights, ids = _routing(9)
    expected = _loop(x, weights, ids, homes, limit)
    exact = ops.experts(x.double(), weights, ids, homes.table(), swiglu_limit=limit)
    torch.testing.assert_close(exact, expected, rtol=1e-11, atol=1e-12 * expected.abs().max())
    got = ops.experts(x, weights, ids, homes.table(), swiglu_limit=limit)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def test_the_limit_clamps_the_gate_from_above_only_and_up_on_both_sides() -> None:
    gate, up = torch.tensor([-30.0, 2.0, 30.0, 1.0]), torch.tensor([1.0, -30.0, 30.0, 3.0])
    clamped = silu(torch.tensor([-30.0, 2.0, 10.0, 1.0])) * torch.tensor([1.0, -10.0, 10.0, 3.0])
    assert torch.equal(reference.swiglu(gate, up, 10.0), clamped)
    assert torch.equal(reference.swiglu(gate, up), silu(gate) * up)


def test_a_weight_on_the_input_scales_what_goes_into_the_expert() -> None:
    homes = Homes()
    x, weights, ids = _routing(6, top_k=1)
    ones = torch.ones_like(weights)
    got = ops.experts(x.double(), weights, ids, homes.table(), weight_on_input=True)
    expected = _loop(x.double() * weights, ones, ids, homes, None)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12 * expected.abs().max())


def test_the_same_bytes_elsewhere_give_the_same_bits() -> None:
    here, there = Homes(), Homes()
    x, weights, ids = _routing(40)
    mixed = here.table().addresses.clone()
    mixed[::2] = there.table().addresses[::2]
    assert not torch.equal(mixed, here.table().addresses)
    table = dataclasses.replace(here.table(), addresses=mixed)
    first = ops.experts(x, weights, ids, here.table())
    assert torch.equal(ops.experts(x, weights, ids, table), first)


def test_the_order_of_a_tokens_picks_does_not_change_a_bit() -> None:
    homes = Homes()
    x, weights, ids = _routing(40, top_k=4)
    first = ops.experts(x, weights, ids, homes.table())
    assert torch.equal(ops.experts(x, weights.flip(1), ids.flip(1).int(), homes.table()), first)


def test_a_tokens_picks_are_added_in_float32_in_ascending_order() -> None:
    homes = Homes()
    x, weights, ids = _routing(40, top_k=4)
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        total += ops.experts(x, weights, torch.where(ids == expert, ids, -1), homes.table())
    assert torch.equal(ops.experts(x, weights, ids, homes.table()), total)


def test_poisoning_an_experts_memory_changes_exactly_the_rows_routed_to_it() -> None:
    homes = Homes()
    table = homes.table()
    x, weights, ids = _routing(30)
    before = ops.experts(x, weights, ids, table)
    homes.tensors[3][2][0].fill_(0x5A5A)  # down.trellis
    after = ops.experts(x, weights, ids, table)
    routed = (ids == 3).any(dim=1)
    assert 0 < routed.sum() < len(x)
    assert (before != after).any(dim=1).tolist() == routed.tolist()


def test_an_address_changed_between_calls_is_followed() -> None:
    homes, others = Homes(seed=0), Homes(seed=1)
    table = homes.table()
    x, weights, _ = _routing(4, top_k=1)
    ids = torch.full((4, 1), 2)
    table.addresses[2] = others.table().addresses[4]
    expected = ops.experts(x, weights, torch.full((4, 1), 4), others.table())
    assert torch.equal(ops.experts(x, weights, ids, table), expected)


def test_experts_of_another_rank_add_nothing() -> None:
    homes = Homes()
    x, weights, ids = _routing(12)
    here = ids.clone()
    here[here >= 2] = -1
    there = torch.where(here == -1, ids, -1)
    parts = [ops.experts(x.double(), weights, part, homes.table()) for part in (here, there)]
    whole = ops.experts(x.double(), weights, ids, homes.table())
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-12, atol=1e-12)
    assert not parts[0][(here == -1).all(dim=1)].any()
    assert not ops.experts(x, weights, torch.full_like(ids, -1), homes.table()).any()


def test_one_expert_picked_twice_by_a_token_counts_twice() -> None:
    homes = Homes()
    x, _, _ = _routing(3)
    twice = ops.experts(x, torch.full((3, 2), 0.25), torch.full((3, 2), 1), homes.table())
    once = ops.experts(x, torch.full((3, 1), 0.5), torch.full((3, 1), 1), homes.table())
    torch.testing.assert_close(twice, once)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_activations_are_widened_once_and_rounded_once(dtype: torch.dtype) -> None:
    x, weights, ids = _routing(5)
    x, homes = x.to(dtype), Homes()
    got = ops.experts(x, weights, ids, homes.table())
    assert got.dtype == dtype
    assert torch.equal(got, ops.experts(x.float(), weights, ids, homes.table()).to(dtype))


def test_no_tokens_give_no_rows() -> None:
    x, weights, ids = _routing(2)
    assert ops.experts(x[:0], weights[:0], ids[:0], Homes().table()).shape == (0, HIDDEN)


def test_a_touched_expert_is_stored_once_where_it_is_to_be_kept() -> None:
    homes, (x, weights, _) = Homes(), _routing(6)
    table = homes.table()
    size = sum(int(HIDDEN * INNER * bits) // 8 for bits in BITS)
    slots = [_aligned(torch.zeros(size, dtype=torch.uint8)) for _ in range(EXPERTS)]
    fill = torch.tensor([0, *(slot.data_ptr() for slot in slots[1:4]), -7])
    wanted = fill.clone()
    ids = torch.tensor([[0, 2], [2, 3], [4, 0], [3, 2], [0, 4], [4, 3]])
    kept = ops.experts(x, weights, ids, table, fill=fill)
    assert torch.equal(kept, ops.experts(x, weights, ids, table))
    assert fill.tolist() == [0, int(wanted[1]), -int(wanted[2]), -int(wanted[3]), -7]
    for expert, slot in enumerate(slots):
        parts = [p[0].view(torch.uint8).flatten() for p in homes.tensors[expert]]
        assert torch.equal(slot, torch.cat(parts)) == (expert in (2, 3))
        assert slot.any() == (expert in (2, 3))
    homes.tensors[2][0][0].zero_()
    ops.experts(x, weights, ids, table, fill=fill)
    assert slots[2][: homes.tensors[2][0][0].nbytes].any()  # stored once: not overwritten


def test_a_kept_expert_serves_from_its_new_place_with_the_same_bits() -> None:
    homes, (x, weights, ids) = Homes(), _routing(8)
    table = homes.table()
    before = ops.experts(x, weights, ids, table)
    sizes = [int(HIDDEN * INNER * bits) // 8 for bits in BITS]
    slot = _aligned(torch.zeros(sum(sizes), dtype=torch.uint8))
    fill = torch.zeros(EXPERTS, dtype=torch.int64)
    fill[1] = slot.data_ptr()
    ops.experts(x, weights, ids, table, fill=fill)
    base = -int(fill[1])
    starts = [base, base + sizes[0], base + sizes[0] + sizes[1]]
    table.addresses[1, :, 0] = torch.tensor(starts)
    for projection in homes.tensors[1]:
        projection[0].zero_()
    assert torch.equal(ops.experts(x, weights, ids, table), before)


def test_a_fill_that_does_not_match_the_table_is_refused() -> None:
    x, weights, ids = _routing(2)
    for fill in (torch.zeros(EXPERTS - 1, dtype=torch.int64), torch.zeros(EXPERTS)):
        with pytest.raises(ValueError, match=r"fill must be contiguous int64 \[5\]"):
            ops.experts(x, weights, ids, Homes().table(), fill=fill)
