"""Predictions: split by cause, with ranges, and in line with what was publicly measured."""

import re
import time
from pathlib import Path

import pytest
from machines import machine
from plan_builders import checkpoint, deepseek_v41_flash, gpu, host, layer

from appliance.plan.explain import show_lines
from appliance.plan.hardware import (
    GIB,
    GPUS,
    HOSTS,
    gpu_model,
    hardware_lines,
    host_model,
    recognise,
)
from appliance.plan.kernel_curve import H200
from appliance.plan.model import Plan
from appliance.plan.planner import Policy, plan
from appliance.plan.routing import Heat

NEAR, FAR = "two-rtx-pro-6000-healthy", "two-rtx-pro-6000"
TOPICS = 8


def skewed_heat() -> Heat:
    """Each topic has its own favourites among experts that all like."""
    topics = {
        str(t): {
            i: tuple(1000.0 / (1 + (e * 37 + i) % 384) + 200.0 / (1 + (e * 11 + t * 53) % 384)
                     for e in range(384))
            for i in range(40)
        }
        for t in range(TOPICS)
    }  # fmt: skip
    total = {i: tuple(map(sum, zip(*(t[i] for t in topics.values()), strict=True)))
             for i in range(40)}  # fmt: skip
    return Heat(total, topics)


@pytest.fixture(scope="module")
def near() -> Plan:
    return plan(machine(NEAR), deepseek_v41_flash(), skewed_heat(), Policy(cache_slots=96))


def test_without_skew_the_link_carries_what_arithmetic_says() -> None:
    # FACTS section 3: a cold share of 30 % costs 9.6 ms at one row, 55 ms at six (uniform).
    made = plan(machine(NEAR), deepseek_v41_flash(), None, Policy())
    by_streams = {p.streams: p for p in made.predictions}
    scale = by_streams[1].cold_share / 0.30
    assert by_streams[1].link_ms_per_step == pytest.approx(9.6 * scale, rel=0.03)
    assert by_streams[6].link_ms_per_step == pytest.approx(55 * scale, rel=0.03)


def test_every_number_has_a_range_around_it(near: Plan) -> None:
    assert [p.streams for p in near.predictions] == [1, 2, 4, 6, 8]
    for p in near.predictions:
        for part in (p.compute_ms, p.waiting_ms, p.topology_ms, p.tokens_per_second):
            assert part is not None and part.low <= part.likely <= part.high
        assert p.tokens_per_second is not None
        assert p.tokens_per_second.low < p.tokens_per_second.high
    assert near.forecast is not None and near.forecast.assumptions


def test_more_streams_are_slower_each_but_faster_together(near: Plan) -> None:
    speeds = [p.tokens_per_second.likely for p in near.predictions if p.tokens_per_second]
    assert speeds == sorted(speeds, reverse=True)
    totals = [n * s for n, s in zip((1, 2, 4, 6, 8), speeds, strict=True)]
    assert totals == sorted(totals)


def test_a_far_memory_node_is_charged_to_topology_and_not_to_host_reads() -> None:
    healthy = machine(NEAR)
    assert healthy.gpus is not None
    moved = healthy.gpus[1].model_copy(update={"numa_node": 1})
    apart = healthy.model_copy(update={"gpus": (healthy.gpus[0], moved)})
    one = plan(healthy, deepseek_v41_flash(), None, Policy()).predictions[0]
    two = plan(apart, deepseek_v41_flash(), None, Policy()).predictions[0]
    assert one.topology_ms is not None and one.topology_ms.high == 0
    assert two.topology_ms is not None and two.topology_ms.low > 0
    assert one.waiting_ms == two.waiting_ms and one.compute_ms == two.compute_ms


def test_a_slow_link_makes_the_prediction_slower_and_the_plan_the_same_size() -> None:
    slow = plan(machine(FAR), deepseek_v41_flash(), None, Policy()).predictions[0]
    fast = plan(machine(NEAR), deepseek_v41_flash(), None, Policy()).predictions[0]
    assert slow.waiting_ms is not None and fast.waiting_ms is not None
    assert slow.waiting_ms.likely > 1.5 * fast.waiting_ms.likely
    assert slow.link_bytes_per_step == fast.link_bytes_per_step


def test_a_first_read_of_128k_takes_about_what_was_publicly_measured(near: Plan) -> None:
    assert near.forecast is not None
    seconds = {p.tokens: p.seconds for p in near.forecast.prefill}
    assert sorted(seconds) == [4096, 32768, 131072]
    # FACTS section 1: 18.33 s on the reference deployment, whose chunk is not public.
    assert seconds[131072].low < 18.33 < seconds[131072].high
    others = near.forecast.prefill[-1].others_tokens_per_second
    assert 0 < others.likely < 5


def test_a_topic_left_out_is_colder_and_slots_win_most_of_it_back(near: Plan) -> None:
    assert near.forecast is not None and near.forecast.cold is not None
    cold = near.forecast.cold
    assert cold.held_out is not None and cold.held_out_settled is not None
    assert cold.held_out > cold.in_sample > cold.held_out_settled > 0
    assert any("a topic that was left out" in a for a in near.forecast.assumptions)


def test_a_curve_from_the_users_own_card_narrows_the_range_and_is_named() -> None:
    mine = H200.model_copy(update={"name": "exl3_moe on this card"})
    cards = machine(NEAR)
    ours = plan(cards, deepseek_v41_flash(), None, Policy(), mine)
    built_in = plan(cards, deepseek_v41_flash(), None, Policy())
    assert built_in.made_from.curve is None and ours.made_from.curve == mine.digest
    narrow, wide = (p.predictions[-1].compute_ms for p in (ours, built_in))
    assert narrow is not None and wide is not None
    assert narrow.high - narrow.low < wide.high - wide.low
    assert built_in.forecast is not None and ours.forecast is not None
    assert set(built_in.forecast.assumptions) - set(ours.forecast.assumptions)


def test_the_summary_shows_what_a_resident_costs_in_context_and_a_slot_in_host_memory() -> None:
    made = plan(machine(NEAR), deepseek_v41_flash(), None, Policy())
    trades = [line for line in show_lines(made) if line.startswith("trade")]
    # 40 blocks of 6,635,520 B; 2,240 B a token; both ranks keep a copy (FACTS: 0.5 GiB a slot).
    assert "253.1 MiB, 118,491 tokens" in trades[0]
    assert "506.2 MiB of host memory" in trades[1]


def test_an_unknown_card_gets_bytes_but_no_speed() -> None:
    strange = gpu(0).model_copy(update={"name": "NVIDIA Something 9000"})
    made = plan(host((strange,)), checkpoint(), None, Policy(host_share=0.5))
    step = made.predictions[0]
    assert step.link_bytes_per_step > 0 and step.link_ms_per_step is not None
    assert step.tokens_per_second is None and step.compute_ms is None
    assert made.forecast is not None and made.forecast.prefill == ()


def test_expert_parallel_ranks_are_each_asked_for_their_own_experts() -> None:
    small = checkpoint((layer(0, 8), layer(1, 8)))
    both = host((gpu(0), gpu(1)))
    made = plan(both, small, None, Policy(expert_parallel=True, host_share=0.5))
    assert made.predictions[0].cold_share == pytest.approx(0.5)
    assert made.predictions[0].waiting_ms is not None


def test_topics_and_slots_still_plan_in_under_a_second() -> None:
    heat, taken = skewed_heat(), []
    for _ in range(3):  # the least: other processes share this core's caches
        start = time.process_time()
        plan(machine(NEAR), deepseek_v41_flash(), heat, Policy(cache_slots=96))
        taken.append(time.process_time() - start)
    assert min(taken) < 1.0


def test_cards_are_recognised_by_the_name_the_driver_gives() -> None:
    names = {
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
        "NVIDIA H200": "h200",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "NVIDIA A100-SXM4-80GB": "a100-80g",
        "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
        "NVIDIA GH200 480GB": "gh200",
    }
    for name, key in names.items():
        found = recognise(name)
        assert found is not None and found.key == key
    assert recognise("NVIDIA Something 9000") is None and recognise(None) is None
    assert recognise("NVIDIA H100 PCIe") is None, "slower than the card in the table"
    assert len({m.key for m in GPUS}) == len(GPUS)
    assert gpu_model("H200").key == "h200" and host_model("desktop").numa_nodes == 1


def test_every_card_and_host_names_its_source_and_measured_memory_is_what_logs_show(
    shared: Path,
) -> None:
    logs = "".join(
        path.read_text(errors="replace") for path in (shared / "cases" / "smi").iterdir()
    )
    logs += (shared / "recorded" / "h200-1gpu" / "nvidia-smi.txt").read_text()
    for card in GPUS:
        assert card.rates_from.startswith("NVIDIA ")
        if card.memory_from == "nominal":
            assert card.memory_bytes % GIB == 0
        else:
            mib = card.memory_bytes >> 20
            assert card.memory_from.startswith("measured") and f"{mib:,} MiB" in card.memory_from
            assert re.search(rf"\b{mib} ?MiB", logs)
    assert all(box.source for box in HOSTS)
    assert sum(1 for _ in hardware_lines()) == len(GPUS) + len(HOSTS) + 2
