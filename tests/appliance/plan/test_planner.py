"""plan(): one home per expert, budgets kept, the same bytes every time."""

import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_builders import GIB, checkpoint, deepseek_v41_flash, expert, gpu, host, layer

from appliance.checkpoint.model import Checkpoint
from appliance.errors import DoesNotFit
from appliance.plan.check import check_plan
from appliance.plan.explain import explain
from appliance.plan.model import Plan, expert_block_bytes
from appliance.plan.planner import Policy, plan
from appliance.plan.routing import Heat, merge

MIB = 1 << 20
# Everything of the small model but its experts, and room for some of those.
FIXED = Policy(device_capacity_bytes=64 * MIB, streams=1, conversations=2, context_tokens=128,
               prefill_chunk_tokens=128)  # fmt: skip


def held(made: Plan) -> int:
    parts = ("routed experts, resident", "cache slots")
    return sum(i.size_bytes for r in made.ranks for i in r.ledger if i.part in parts)


def tight(extra_blocks: int, cache_slots: int = 0, heat: Heat | None = None) -> Plan:
    """A plan whose device has room for exactly that many experts of the small model."""
    block = expert_block_bytes(expert(), 1)
    all_of_it = plan(host(), checkpoint(), heat, FIXED)
    fixed = all_of_it.ranks[0].total_bytes("device") - held(all_of_it)
    capacity = fixed + extra_blocks * block
    policy = replace(FIXED, device_capacity_bytes=capacity, cache_slots=cache_slots)
    return plan(host(), checkpoint(), heat, policy)


def test_the_hottest_experts_stay_and_the_rest_go_to_the_host() -> None:
    heat = Heat({0: (9, 1, 8, 1, 1, 1, 1, 1), 1: (1, 1, 1, 1, 1, 1, 1, 9)})
    made = tight(3, heat=heat)
    assert made.ranks[0].layers[0].device == "0,2"
    assert made.ranks[0].layers[1].device == "7"


def test_without_counts_layers_share_evenly_and_the_plan_says_so() -> None:
    made = tight(6)
    assert [la.device for la in made.ranks[0].layers] == ["0-2", "0-2"]
    assert any("routing counts are known for 0 of 2 layers" in note for note in made.notes)


def test_all_half_or_no_experts_on_the_host_can_be_asked_for() -> None:
    for share, host_ids in ((0.0, ""), (0.5, "4-7"), (1.0, "0-7")):
        made = plan(host(), checkpoint(), None, Policy(host_share=share))
        assert [la.host for la in made.ranks[0].layers] == [host_ids, host_ids]


def test_a_machine_without_a_gpu_gets_half_of_the_experts_in_each_home() -> None:
    made = plan(host(memory=8 * GIB), checkpoint(), None, Policy())
    assert made.ranks[0].device == "cpu" and made.ranks[0].gpu is None
    assert [(la.device, la.host) for la in made.ranks[0].layers] == [("0-3", "4-7")] * 2


def test_expert_parallel_ranks_own_contiguous_whole_experts() -> None:
    policy = Policy(tensor_parallel=2, expert_parallel=True, host_share=0.5)
    made = plan(host(), checkpoint(), None, policy)
    assert [r.layers[0].device for r in made.ranks] == ["0-1", "4-5"]
    assert [r.layers[0].host for r in made.ranks] == ["2-3", "6-7"]
    assert made.predictions[0].cold_share == pytest.approx(0.5)


def test_cache_slots_are_taken_from_residents_and_cost_a_host_copy() -> None:
    without, with_slots = tight(8), tight(8, cache_slots=2)
    assert held(without) == held(with_slots)
    assert [la.cache_slots for la in with_slots.ranks[0].layers] == [2, 2]
    copies = with_slots.ranks[0].total_bytes("host") - without.ranks[0].total_bytes("host")
    assert copies == 4 * expert_block_bytes(expert(), 1)


def test_slots_start_with_the_hottest_of_the_host_and_the_plan_says_what_it_promises() -> None:
    a, b = (9.0, 9, 0, 0, 1, 0, 0, 0), (9.0, 0, 9, 0, 0, 1, 0, 0)
    both = {i: tuple(x + y for x, y in zip(a, b, strict=True)) for i in (0, 1)}
    heat = Heat(both, {"a": {0: a, 1: a}, "b": {0: b, 1: b}})
    made = tight(6, cache_slots=2, heat=heat)
    first = made.ranks[0].layers[0]
    assert (first.device, first.in_slots) == ("0", "1-2")
    # Topic a with its own two best slots (1 and 4): nothing of it would be cold.
    assert made.cache is not None and made.cache.promised_cold_share == 0.0
    assert tight(6, heat=heat).cache is None


@pytest.mark.parametrize("whole", [False, True])
def test_the_promise_is_one_that_every_rank_can_keep(whole: bool) -> None:
    """Each rank counts its own cold picks. Behind unequal links, and with whole experts, a promise
    for all together is broken for good on one of them, whose slots would never rest."""
    draw = random.Random(3)
    topics = {name: {i: tuple(int(1000 * draw.random() ** 4) for _ in range(64)) for i in range(3)}
              for name in "ab"}  # fmt: skip
    heat = Heat({i: tuple(map(sum, zip(topics["a"][i], topics["b"][i], strict=True)))
                 for i in range(3)}, topics)  # fmt: skip
    model = checkpoint(tuple(layer(i, 64, 4, expert(1024, 1024)) for i in range(3)))
    asked = Policy(host_share=0.5, cache_slots=8, context_tokens=128, expert_parallel=whole,
                   link_bytes_per_second=(50e9, 15e9))  # fmt: skip
    made = plan(host((gpu(0), gpu(1)), nodes=1), model, heat, asked)
    least = []
    for rank in made.ranks:
        by_topic = []
        for counts in topics.values():
            picks = {p.layer: sum(counts[p.layer][e] for e in p.host_experts | p.device_experts)
                     for p in rank.layers}  # fmt: skip
            wanted = {(p.layer, e): counts[p.layer][e] / picks[p.layer]
                      for p in rank.layers for e in p.host_experts}  # fmt: skip
            kept = sorted(wanted, key=lambda key: -wanted[key])[: 3 * 8]  # slots of one pool
            by_topic.append(sum(share for key, share in wanted.items() if key not in kept) / 3)
        least.append(min(by_topic))
    assert max(least) > 2 * min(least)
    assert made.cache is not None
    assert made.cache.promised_cold_share == pytest.approx(max(least), abs=1e-6)


def test_a_layer_that_fits_whole_needs_no_slots() -> None:
    made = tight(16, cache_slots=2)
    assert [(la.device, la.cache_slots) for la in made.ranks[0].layers] == [("0-7", 0)] * 2


def test_slots_that_are_asked_for_and_not_there_are_counted_in_a_note() -> None:
    """Half of 16 experts are on the host: 6 slots a layer are 4, where 2 are 2 and no word."""
    for wish, have in ((6, 4), (2, 2)):
        made = plan(host(), checkpoint(), None, Policy(host_share=0.5, cache_slots=wish))
        assert [place.cache_slots for place in made.ranks[0].layers] == [have, have]
        noted = f"{wish} cache slots a layer are asked for, and the layers have {have} to {have}"
        assert any(note.startswith(noted) for note in made.notes) is (have < wish)
    drafting = checkpoint((layer(0), layer(1, draft=True)))
    drafted = plan(host(), drafting, None, Policy(host_share=0.5, cache_slots=2, draft=True))
    assert not any("asked for" in note for note in drafted.notes)
    whole = tight(16, cache_slots=2)
    assert any("asked for, and the layers have 0 to 0" in note for note in whole.notes)


def test_the_same_inputs_give_the_same_bytes_whatever_their_order() -> None:
    heat = {i: tuple(float((7 * e + i) % 50) for e in range(8)) for i in (0, 1)}
    layers = (layer(0), layer(1))
    one = plan(host(), checkpoint(layers), Heat(heat), FIXED)
    shuffled = Heat(dict(reversed(heat.items())))
    two = plan(host(), checkpoint(layers[::-1]), shuffled, FIXED)
    assert one.to_json() == two.to_json()


def test_free_memory_does_not_change_the_plan() -> None:
    busy = host().model_copy(update={"memory_available_bytes": 300 * GIB})
    assert plan(busy, checkpoint(), None, FIXED) == plan(host(), checkpoint(), None, FIXED)


def test_every_expert_of_a_giant_is_planned_in_under_a_second() -> None:
    giant = deepseek_v41_flash()
    counts = {i: tuple(float((e * 7919 + i) % 383) for e in range(384)) for i in range(40)}
    start = time.process_time()
    made = plan(host((gpu(0), gpu(1))), giant, Heat(counts), Policy())
    assert time.process_time() - start < 1.0
    assert len(made.to_json()) < 200_000


def test_a_slow_link_is_the_one_that_is_predicted() -> None:
    cards = host((gpu(0), gpu(1, generation=4, width=8)))
    made = plan(cards, deepseek_v41_flash(), None, Policy())
    fast, slow = (r.link_bytes_per_second for r in made.ranks)
    assert fast is not None and slow is not None and round(fast / slow) == 4
    step = made.predictions[0]
    assert step.link_ms_per_step == pytest.approx(step.link_bytes_per_step / slow * 1e3, rel=1e-3)


def test_an_unknown_link_gives_no_time_rather_than_zero() -> None:
    unknown = gpu(0).model_copy(update={"pcie_width": None})
    made = plan(host((unknown,)), checkpoint(), None, Policy(host_share=0.5))
    assert made.predictions[0].link_ms_per_step is None
    assert made.predictions[0].link_bytes_per_step > 0


def test_explain_says_where_an_expert_lives_and_why() -> None:
    heat = Heat({0: (9, 1, 8, 1, 1, 1, 1, 1), 1: (1, 1, 1, 1, 1, 1, 1, 9)})
    made = tight(3, heat=heat)
    assert "on the host of rank 0: the device keeps the 2 hottest of 8" in explain(made, 0, 3)
    two = plan(host((gpu(0), gpu(1))), checkpoint(), None, Policy(host_share=0.5))
    assert "on the device of rank 0 and rank 1: the device keeps 4 of 8" in explain(two, 1, 3)
    assert "number 1 of 8 by heat" in explain(made, 1, 7, heat)


def test_cards_on_one_memory_node_are_taken_before_cards_that_are_far_apart() -> None:
    four = tuple(gpu(i, numa_node=node) for i, node in enumerate((0, 1, 1, 0)))
    made = plan(host(four), checkpoint(), None, Policy(tensor_parallel=2))
    assert [r.gpu for r in made.ranks] == ["GPU-0", "GPU-3"]
    lost = (four[0].model_copy(update={"fault": "GPU is lost"}), *four[1:])
    made = plan(host(lost), checkpoint(), None, Policy(tensor_parallel=2))
    assert [r.gpu for r in made.ranks] == ["GPU-1", "GPU-2"]
    nine = checkpoint((layer(0, 9), layer(1, 9)), num_attention_heads=9, num_key_value_heads=3)
    three = plan(host(four), nine, None, Policy(tensor_parallel=3, expert_parallel=True))
    assert [r.gpu for r in three.ranks] == ["GPU-0", "GPU-1", "GPU-2"]


def wide_model() -> Checkpoint:
    """Enough bytes in experts that a card of a few GB holds some of them."""
    shape = expert(8192, 8192)
    return checkpoint((layer(0, 8, 2, shape), layer(1, 8, 2, shape)))


heats = st.lists(st.lists(st.integers(0, 50), min_size=8, max_size=8), min_size=2, max_size=2).map(
    lambda rows: Heat({i: tuple(float(c) for c in row) for i, row in enumerate(rows)})
)


@settings(max_examples=60, deadline=None)
@given(heat=heats, blocks=st.integers(0, 17), slots=st.integers(0, 3))
def test_one_home_per_expert_and_no_budget_is_passed(heat: Heat, blocks: int, slots: int) -> None:
    made = tight(blocks, slots, heat)
    check_plan(made, host(), checkpoint())
    rank = made.ranks[0]
    assert rank.total_bytes("device") <= rank.device_capacity_bytes
    for placement in rank.layers:
        assert placement.device_experts | placement.host_experts == set(range(8))
        assert not placement.device_experts & placement.host_experts


@settings(max_examples=60, deadline=None)
@given(heat=heats, blocks=st.integers(0, 16), slots=st.integers(0, 3))
def test_more_memory_never_holds_fewer_experts(heat: Heat, blocks: int, slots: int) -> None:
    assert held(tight(blocks + 1, slots, heat)) >= held(tight(blocks, slots, heat))


@settings(max_examples=60, deadline=None)
@given(
    heat=st.none() | heats,
    megabytes=st.integers(6_100, 7_600),
    more=st.integers(1, 4 << 20),
    context=st.none() | st.sampled_from((512, 4096)),
    conversations=st.none() | st.integers(300, 2000),
    fp8=st.booleans(),
)
def test_the_planners_own_split_of_a_card_keeps_every_budget_and_more_never_holds_less(
    heat: Heat | None,
    megabytes: int,
    more: int,
    context: int | None,
    conversations: int | None,
    fp8: bool,
) -> None:
    """Residents, slots and KV cache are all left to the planner, on a card too small for all."""
    small = megabytes * 1_000_000

    def made(capacity: int) -> Plan | None:
        policy = Policy(
            device_capacity_bytes=capacity, reserve_bytes=0, streams=300, context_tokens=context,
            conversations=conversations, kv_dtype="fp8" if fp8 else "auto",
            prefill_chunk_tokens=128,
        )  # fmt: skip
        try:
            return plan(host((gpu(0),)), wide_model(), heat, policy)
        except DoesNotFit:
            return None

    before, after = made(small), made(small + more)
    if before is None:
        return
    assert after is not None, "it fitted on less"
    for one in (before, after):
        check_plan(one, host((gpu(0),)), wide_model())
        rank = one.ranks[0]
        assert rank.total_bytes("device") <= rank.device_capacity_bytes
        assert rank.total_bytes("host") <= host().memory_total_bytes
    assert held(after) >= held(before)


def test_slots_take_a_third_of_what_is_held_all_of_an_unknown_layer_and_no_more_than_memory() -> (
    None
):
    known = Heat({0: tuple(float(e + 1) for e in range(384))})
    big = (layer(0, 384, 6, expert(1024, 1024)), layer(1, 384, 6, expert(1024, 1024)))
    policy = Policy(device_capacity_bytes=7 * GIB // 2, reserve_bytes=0, streams=1,
                    context_tokens=128, prefill_chunk_tokens=128)  # fmt: skip

    def slots(memory: int) -> list[tuple[int, int]]:
        made = plan(host((gpu(0),), memory=memory), checkpoint(big), known, policy)
        return [(len(p.device_experts) + p.cache_slots, p.cache_slots)
                for p in made.ranks[0].layers]  # fmt: skip

    (first, a), (second, b) = slots(64 * GIB)
    assert 0 < a == first // 3 and 0 < b == second
    assert slots(1024 * GIB) == slots(64 * GIB)
    tight_host = slots(6_000 * MIB)
    assert [n for n, _ in tight_host] == [first, second]
    assert 0 < sum(s for _, s in tight_host) < a + b


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(heats, min_size=1, max_size=3), blocks=st.integers(0, 16),
       slots=st.integers(0, 3))  # fmt: skip
def test_no_expert_on_the_host_is_hotter_than_one_the_device_holds(
    parts: list[Heat], blocks: int, slots: int
) -> None:
    heat = Heat(merge(parts).counts, {str(i): part.counts for i, part in enumerate(parts)})
    for placement in tight(blocks, slots, heat).ranks[0].layers:
        row = heat.counts[placement.layer]
        held = placement.device_experts | placement.slot_experts
        moved = placement.host_experts - held
        assert not held or not moved or min(row[e] for e in held) >= max(row[e] for e in moved)


@settings(max_examples=40, deadline=None)
@given(
    heat=st.none() | heats,
    ranks=st.sampled_from((1, 2)),
    expert_parallel=st.booleans(),
    share=st.floats(0.0, 1.0),
    slots=st.integers(0, 3),
)
def test_all_ranks_together_hold_every_expert_whatever_the_split(
    heat: Heat | None, ranks: int, expert_parallel: bool, share: float, slots: int
) -> None:
    policy = Policy(tensor_parallel=ranks, expert_parallel=expert_parallel, host_share=share,
                    cache_slots=slots)  # fmt: skip
    made = plan(host(), checkpoint(), heat, policy)
    check_plan(made, host(), checkpoint())
    for position in range(2):
        lists = [r.layers[position] for r in made.ranks]
        held = [place.device_experts | place.host_experts for place in lists]
        assert set().union(*held) == set(range(8))
        assert sum(map(len, held)) == (8 if expert_parallel else 8 * ranks)
        for place in lists:
            assert place.slot_experts <= place.host_experts
            assert len(place.slot_experts) <= place.cache_slots <= max(slots, 0)


def test_of_an_asked_share_the_slower_link_gets_fewer_experts_and_the_step_is_shorter() -> None:
    two = host((gpu(0), gpu(1)))
    asked = Policy(host_share=0.45, streams=4, context_tokens=4096)
    equal = plan(
        two, deepseek_v41_flash(), None, replace(asked, link_bytes_per_second=(37.5e9,) * 2)
    )
    made = plan(two, deepseek_v41_flash(), None,
                replace(asked, link_bytes_per_second=(50e9, 25e9)))  # fmt: skip
    away = [sum(len(place.host_experts) for place in rank.layers) for rank in made.ranks]
    same = [sum(len(place.host_experts) for place in rank.layers) for rank in equal.ranks]
    assert away[0] == pytest.approx(2 * away[1], abs=1)
    assert sum(away) == pytest.approx(sum(same), abs=1)
    # Every expert is as likely as any other, so reading takes as long as there are experts.
    assert max(away[0] / 50e9, away[1] / 25e9) < 0.7 * same[1] / 25e9
