"""The slot policy: its rules by hand, and the numbers it must reach on real router counts."""

import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

from appliance.plan.contenders import Lru, Paced
from appliance.plan.following import LayerSlots, Promotion
from appliance.plan.heat_files import read_heat
from appliance.plan.held_out import (
    CONSECUTIVE_STICKINESS,
    Split,
    Trial,
    own_plan_trials,
    serve,
    split_homes,
    switch_trials,
    trials,
)
from appliance.plan.model import CacheRules
from appliance.plan.placement import Homes, LayerDemand, choose_homes
from appliance.plan.policy import Cache
from appliance.plan.promise import best_cold
from appliance.plan.routing import Heat
from appliance.plan.simulate import Link
from appliance.plan.traffic import distinct_touched, draw_rows, topic_rows

LINK = Link(layers=40, block_bytes=6_635_520, bytes_per_second=50e9)
SPLIT = Split(top_k=6, held=268, slots=96)  # 70 % of 384, as the planner shares it out
EVEN = Split(top_k=6, held=268, slots=96, even=True)
THREE_LAYERS = CacheRules(promotions_per_row=2 * 3 / 40)
APART = THREE_LAYERS.model_copy(update={"pooled": False})
JUST_CAME, SETTLED = 0, 1
RULES = ("static", "decayed", "clairvoyant")


@pytest.fixture(scope="module")
def heat(shared: Path) -> Heat:
    return read_heat(sorted((shared / "routing").glob("layer_*.json"))).heat


def one_layer(**rules: float) -> tuple[LayerSlots, Cache]:
    layer = LayerSlots(0, 8, slots={4, 5}, cold={6, 7})
    return layer, Cache((layer,), CacheRules(**{"promotions_per_row": 1.0, **rules}))


def cold(found: Sequence[Trial], window: int, rule: str = "decayed") -> list[float]:
    return [trial.windows[window].cold_share[rule] for trial in found]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def test_a_clearly_hotter_expert_takes_the_coldest_slot() -> None:
    layer, cache = one_layer()
    swaps: list[Promotion] = []
    for _ in range(6):
        cache.observe(0, (4, 6))
        swaps += cache.step(1)
    assert swaps == [Promotion(layer=0, expert=6, evict_layer=0, evict=5)]
    assert (layer.slots, layer.cold) == ({4, 6}, {5, 7})


def test_one_pick_is_chance_and_moves_nothing() -> None:
    _, cache = one_layer()
    cache.observe(0, (6, 7))
    assert cache.step(1) == []


def test_promotions_never_pass_the_budget() -> None:
    layer = LayerSlots(0, 200, slots=set(range(100)), cold=set(range(100, 200)))
    cache = Cache((layer,), CacheRules(promotions_per_row=0.25, burst_rows=8))
    done = 0
    for _ in range(100):
        for expert in range(100, 200):
            cache.observe(0, (expert,))
        done += len(cache.step(1))
    assert 20 <= done <= 25


def test_old_picks_fade_so_a_new_topic_wins() -> None:
    layer, cache = one_layer(half_life_rows=20.0)
    for _ in range(200):
        cache.observe(0, (4, 5))
        cache.step(1)
    for _ in range(60):
        cache.observe(0, (6, 7))
        cache.step(1)
    assert layer.slots == {6, 7}


def test_counts_stay_finite_over_a_long_life() -> None:
    layer, cache = one_layer(half_life_rows=0.5)
    for _ in range(400):
        cache.observe(0, (4,))
        cache.step(1)
    assert 0 < max(cache.recent()[0]) < 2
    assert layer.slots == {4, 5}


def test_a_step_of_more_half_lives_than_floats_have_is_forgotten_and_no_error() -> None:
    layer, cache = one_layer(half_life_rows=4.0)
    for rows in (8192, 8192, 1):  # a prefill is one step: 2,048 half-lives
        cache.observe(0, (6,))
        cache.step(rows)
    assert max(cache.recent()[0]) == pytest.approx(0.5 ** (1 / 4))
    for _ in range(20):
        cache.observe(0, (4, 6))
        cache.step(1)
    assert layer.slots == {4, 6}


def test_a_plan_that_keeps_its_promise_is_left_alone() -> None:
    for promised, moved in ((0.9, 0), (0.1, 1)):
        _, cache = one_layer(promised_cold_share=promised)
        swaps = 0
        for _ in range(30):
            cache.observe(0, (4, 6))
            swaps += len(cache.step(1))
        assert (swaps > 0) == bool(moved)


def test_slots_go_home_where_the_plan_misses_less_and_follow_again_where_it_does_not() -> None:
    layer, cache = one_layer(hysteresis=10.0)  # so what following would hold stays as it is
    for rows, picks, held, follows in (
        (60, (6, 7), {6, 7}, True),
        (200, (4, 5), {4, 5}, False),
        (300, (6, 7), {6, 7}, True),
    ):
        swaps: list[Promotion] = []
        for _ in range(rows):
            cache.observe(0, picks)
            swaps += cache.step(1)
        assert (layer.slots, layer.cold, cache.follows) == (held, {4, 5, 6, 7} - held, follows)
        assert len(swaps) == 2 and {s.expert for s in swaps} == held


def test_a_plan_served_what_it_was_made_for_is_not_left_for_long(heat: Heat) -> None:
    """All topics as the counts have them: recent rows know less of that than the plan does."""
    rows = {la: topic_rows([Heat(heat.counts)], la, 6, 8, "1") for la in heat.counts}
    later = ((1000, 2000), (2000, 2500))
    found = serve(heat, [Heat(heat.counts)], SPLIT, THREE_LAYERS, rows, 8, later, RULES)
    for window in found:
        assert window.cold_share["decayed"] <= 1.01 * window.cold_share["static"]
        assert window.promotions_per_row["decayed"] < 0.01


def test_chance_does_not_break_a_promise_that_is_kept() -> None:
    """2 % of 240 picks a row are cold, as promised, asked after every row of a long life."""
    rng = random.Random(5)
    layer = LayerSlots(0, 100, slots=set(range(40, 60)), cold=set(range(60, 100)))
    cache = Cache((layer,), CacheRules(promised_cold_share=0.02))
    swaps = 0
    for _ in range(3000):
        cold = sum(rng.random() < 0.02 for _ in range(240))
        cache.observe(0, [0] * (240 - cold) + rng.choices(range(60, 100), k=cold))
        swaps += len(cache.step(1))
    assert swaps == 0


def test_layers_of_one_block_size_share_their_slots_and_others_do_not() -> None:
    for sizes, expected in (((8, 8), ({4, 5, 6}, {5})), ((8, 16), ({5, 6}, {4, 5}))):
        busy, idle = (LayerSlots(i, 8, {4, 5}, {6, 7}, size) for i, size in enumerate(sizes))
        cache = Cache((busy, idle), CacheRules(promotions_per_row=1.0))
        swaps = 0
        for _ in range(8):
            cache.observe(0, (4, 4, 5, 6, 6, 6) if sizes == (8, 8) else (4, 5, 5, 6, 6, 6))
            cache.observe(1, (5,))
            swaps += len(cache.step(1))
        assert swaps == 1
        assert (busy.slots, idle.slots) == expected


def test_one_pool_reads_a_tenth_fewer_experts_of_an_unknown_topic(heat: Heat) -> None:
    alone = [(name,) for name in heat.topics]

    def distinct(rules: CacheRules) -> float:
        found = trials(heat, alone, EVEN, rules, 4, "1", names=("decayed",))
        return mean([t.windows[SETTLED].distinct_cold["decayed"] for t in found])

    assert distinct(THREE_LAYERS) <= 0.90 * distinct(APART)


def test_lru_takes_every_cold_pick_and_evicts_the_oldest() -> None:
    heat = Heat({0: (9, 8, 7, 6, 5, 4, 3, 2)})
    lru = Lru(split_homes(heat, Split(top_k=1, held=4, slots=2)))
    assert lru.cold(0) == {4, 5, 6, 7}
    lru.see(0, [(2,), (7,)])
    assert lru.cold(0) == {3, 4, 5, 6}
    assert lru.step(2) == 1


def test_what_every_topic_wants_stays_and_what_some_want_gets_slots() -> None:
    heat = Heat({0: (60, 40, 50, 0)}, {"a": {0: (60, 20, 0, 0)}, "b": {0: (0, 20, 50, 0)}})
    demand = LayerDemand(0, (0, 1, 2, 3), 1, heat.counts[0], heat.steady(0) or (), gains=())
    homes = choose_homes(demand, permanent=1, slots=2)
    assert homes.device == (1,) and homes.slots == (0, 2) and homes.host == (0, 2, 3)
    # What the device holds at first is the hottest there is, with slots or without.
    assert set(choose_homes(demand, permanent=2, slots=0).device) == {0, 2}
    assert {*choose_homes(demand, 1, 1).device, *choose_homes(demand, 1, 1).slots} == {0, 2}


def test_six_consecutive_rows_touch_fewer_experts_than_six_independent(heat: Heat) -> None:
    def touched(stickiness: float) -> float:
        found = []
        for layer in heat.counts:
            rows = draw_rows(heat.topics["legal"][layer], 6, "s", stickiness)
            found += [distinct_touched([next(rows) for _ in range(6)]) for _ in range(100)]
        return mean(found)

    assert touched(CONSECUTIVE_STICKINESS) < 0.8 * touched(0)


def test_nobody_who_knows_the_traffic_does_better_at_the_same_pace() -> None:
    homes = {0: Homes((0,), (1, 2), (1, 2, 3, 4)), 1: Homes((0,), (1, 2), (1, 2, 3, 4))}
    traffic = Heat({0: (5, 0, 1, 9, 8), 1: (5, 3, 0, 7, 1)})
    for pooled in (True, False):
        rules = CacheRules(promotions_per_row=0.5, pooled=pooled)
        paced = Paced(homes, traffic, rules)
        assert [paced.step(1) for _ in range(2)] == [0, 1]
        assert 3 not in paced.cold(1), "the hottest comes first"
        while paced.step(2):
            pass
        assert {la: paced.cold(la) for la in homes} == best_cold(
            traffic, homes, {0: 0, 1: 0} if pooled else None
        )


def test_a_pool_gives_the_slots_to_the_layer_that_wants_them() -> None:
    homes = {la: Homes((), (0,), (0, 1, 2)) for la in (0, 1)}
    flat_and_skewed = Heat({0: (1, 1, 1), 1: (98, 1, 1)})
    assert best_cold(flat_and_skewed, homes) == {0: {1, 2}, 1: {1, 2}}
    flatter = Heat({0: (40, 35, 25), 1: (34, 33, 33)})
    assert best_cold(flatter, homes, {0: 0, 1: 0}) == {0: {2}, 1: {0, 1, 2}}
    assert best_cold(flatter, homes, {0: 0, 1: 1}) == {0: {1, 2}, 1: {1, 2}}


@pytest.mark.parametrize(("batch", "link_ms"), [(1, 1.1), (4, 4.2), (6, 6.3)])
@pytest.mark.parametrize(
    ("split", "rules"), [(SPLIT, THREE_LAYERS), (EVEN, APART)], ids=["planned", "even-and-apart"]
)
def test_a_topic_the_plan_never_saw_is_served_from_the_slots(
    heat: Heat, split: Split, rules: CacheRules, batch: int, link_ms: float
) -> None:
    found = trials(heat, [(name,) for name in heat.topics], split, rules, batch, "1", names=RULES)
    assert mean(cold(found, JUST_CAME)) <= 0.041 and max(cold(found, JUST_CAME)) <= 0.053
    assert mean(cold(found, SETTLED)) <= 0.034 and max(cold(found, SETTLED)) <= 0.040
    # One draw; over five the ratio is 1.11 to 1.13, a draw apart by 0.04 (docs/measurements).
    assert mean(cold(found, SETTLED)) <= 1.19 * mean(cold(found, SETTLED, "clairvoyant"))
    distinct = mean([t.windows[SETTLED].distinct_cold["decayed"] for t in found])
    assert LINK.milliseconds(distinct) <= link_ms
    assert mean(cold(found, SETTLED, "static")) > 0.14
    assert all(w.promotions_per_row["decayed"] <= 0.16 for t in found for w in t.windows)


def test_two_unknown_topics_at_once_come_close_to_the_clairvoyant(heat: Heat) -> None:
    pairs = list(combinations(sorted(heat.topics), 2))[::3]
    found = trials(heat, pairs, SPLIT, THREE_LAYERS, 4, "1", names=RULES)
    assert mean(cold(found, SETTLED)) <= 0.053
    assert mean(cold(found, SETTLED)) <= 1.10 * mean(cold(found, SETTLED, "clairvoyant"))


@pytest.mark.parametrize("split", [SPLIT, EVEN], ids=["planned", "even"])
def test_a_planned_topic_stays_where_its_plan_put_it_whatever_the_draw(
    heat: Heat, split: Split
) -> None:
    for seed in ("1", "2", "3"):
        found = own_plan_trials(heat, split, THREE_LAYERS, 4, seed, names=RULES)
        assert mean(cold(found, SETTLED)) <= 0.015
        for window in (JUST_CAME, SETTLED):
            assert mean(cold(found, window)) <= mean(cold(found, window, "static")) + 0.0005


def test_after_a_switch_the_new_topic_is_soon_served_as_if_it_had_come_first(heat: Heat) -> None:
    found = switch_trials(heat, SPLIT, THREE_LAYERS, 4, "1", names=RULES)
    assert mean(cold(found, SETTLED)) <= 1.20 * mean(cold(found, SETTLED, "clairvoyant"))
    assert mean(cold(found, JUST_CAME)) <= 0.053
