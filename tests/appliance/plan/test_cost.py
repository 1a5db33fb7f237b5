"""The cost of a layer: the measured curve, and the optimiser against an exact solver."""

import json
import math
import random
import time
from itertools import pairwise, product
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from appliance.errors import UsageError
from appliance.plan.cost import cold_layer_seconds, gains, layer_costs, row_probabilities, touched
from appliance.plan.heat_files import read_heat
from appliance.plan.kernel_curve import (
    EXL3_MOE,
    H200,
    curve_from_json,
    curve_from_measurements,
)
from appliance.plan.placement import LayerDemand, choose_homes, fill
from appliance.plan.predict import in_common, slowest
from appliance.plan.routing import Heat

EXPERT_BYTES = 3 * 7168 * 2048 * 3 // 8
probabilities = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=10)


def rows_of(shared: Path) -> list[dict[str, object]]:
    file = shared / "recorded" / "h200-1gpu" / "bench" / "run3_b3_decode.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def demand(number: int, reads: list[float], block: int, rate: float = 50e9) -> LayerDemand:
    costs = layer_costs(tuple(reads), block, rate, H200)
    steady = tuple(reads)
    return LayerDemand(number, tuple(range(len(reads))), block, steady, steady, gains(costs))


def skewed(seed: int, experts: int) -> list[float]:
    rng = random.Random(seed)
    counts = [rng.paretovariate(0.7 + rng.random()) for _ in range(experts)]
    return [touched(p, 4) for p in row_probabilities(counts, experts, max(1, experts // 6))]


def test_a_layer_follows_the_measured_curve_of_host_experts(shared: Path) -> None:
    rows = rows_of(shared)
    copy_rate = next(float(str(r["memcpy_256M_GBs"])) for r in rows if "memcpy_256M_GBs" in r) * 1e9
    rate = copy_rate * EXL3_MOE.zero_copy_share
    device = EXL3_MOE.device_seconds(6 * EXPERT_BYTES)
    measured = {r["host_of_6"]: float(str(r["moe_us"])) for r in rows if r.get("sec") == "mix"}
    assert sorted(measured) == list(range(7))  # type: ignore[type-var]
    for h, microseconds in measured.items():
        predicted = EXL3_MOE.layer_seconds(device, int(str(h)) * EXPERT_BYTES, rate) * 1e6
        assert predicted == pytest.approx(microseconds, rel=0.05)


def test_the_built_in_curve_is_the_one_the_measurements_give(shared: Path) -> None:
    curve = curve_from_measurements(EXL3_MOE.name, rows_of(shared))
    assert curve.host_start_seconds == pytest.approx(EXL3_MOE.host_start_seconds, abs=3e-6)
    for (size, seconds), (known, expected) in zip(
        (p for p in curve.device_points if p[0] != 2 * EXPERT_BYTES),
        EXL3_MOE.device_points,
        strict=True,
    ):
        assert (size, seconds) == (known, pytest.approx(expected))


def test_measurements_that_make_no_curve_are_refused() -> None:
    with pytest.raises(UsageError, match="needs decode rows"):
        curve_from_measurements("x", [])
    with pytest.raises(UsageError, match="no number moe_vram"):
        curve_from_measurements("x", [{"sec": "decode", "tag": "8x8k3", "experts": 1}])


def test_a_curve_survives_its_own_json_and_nothing_else_is_one() -> None:
    assert curve_from_json(H200.model_dump_json()) == H200
    for bad in ("{", "{}", H200.model_copy(update={"device_points": ()}).model_dump_json()):
        with pytest.raises(UsageError, match="kernel curve"):
            curve_from_json(bad)


@settings(max_examples=50, deadline=None)
@given(reads=probabilities, slow=st.booleans())
def test_expected_cost_is_the_average_over_every_outcome(reads: list[float], slow: bool) -> None:
    rate = 50e9 if slow else 900e9
    costs = layer_costs(tuple(reads), EXPERT_BYTES, rate, H200)
    device = H200.device_seconds(sum(reads) * EXPERT_BYTES)
    coldest = sorted(reads)
    for cold_count in {0, len(reads) // 2, len(reads)}:
        cold = coldest[:cold_count]
        exact = 0.0
        for picks in product((False, True), repeat=cold_count):
            chance = numpy.prod([p if hit else 1 - p for p, hit in zip(cold, picks, strict=True)])
            exact += chance * H200.layer_seconds(device, sum(picks) * EXPERT_BYTES, rate)
        assert costs[len(reads) - cold_count] == pytest.approx(exact, rel=1e-9)
        alone = cold_layer_seconds(tuple(cold), EXPERT_BYTES, rate, H200, device)
        assert alone == pytest.approx(exact, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(reads=probabilities)
def test_every_further_resident_saves_time_and_less_than_the_one_before(reads: list[float]) -> None:
    costs = layer_costs(tuple(reads), EXPERT_BYTES, 50e9, H200)
    saved = gains(costs)
    assert len(saved) == len(reads)
    assert all(a >= b >= 0 for a, b in pairwise(saved))
    assert costs[0] - sum(saved) == pytest.approx(costs[-1], abs=1e-9)


def test_probabilities_add_up_to_top_k_and_none_passes_one() -> None:
    chance = row_probabilities((100.0, 50.0, 1.0, 1.0, 0.0), 5, 2)
    assert sum(chance) == pytest.approx(2) and max(chance) == 1.0 and chance[4] == 0.0
    assert row_probabilities(None, 8, 2) == (0.25,) * 8
    assert row_probabilities((1.0, 0.0, 0.0), 3, 2) == (1.0, 0.0, 0.0)


def exact(layers: list[LayerDemand], budget: int) -> float:
    """The least total cost of any quotas, by integer programming."""
    values = [g for layer in layers for g in layer.gains]
    sizes = [layer.block_bytes for layer in layers for _ in layer.gains]
    weight = LinearConstraint(numpy.array([sizes], dtype=float), -numpy.inf, budget)
    solved = milp(-numpy.array(values), constraints=[weight], bounds=Bounds(0, 1),
                  integrality=numpy.ones(len(values)))  # fmt: skip
    assert solved.success
    return -float(solved.fun)


@pytest.mark.parametrize("seed", range(12))
def test_quotas_are_within_one_per_cent_of_an_exact_solver(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [rng.choice((2, 3, 4)) * 1_000_000 for _ in range(5)]  # K differs by layer
    layers = [demand(i, skewed(seed * 100 + i, 24), block) for i, block in enumerate(blocks)]
    budget = int(rng.uniform(0.2, 0.9) * sum(24 * block for block in blocks))
    quotas = fill(layers, budget)
    assert sum(n * b for n, b in zip(quotas, blocks, strict=True)) <= budget
    nothing_held = sum(layer_costs(la.heat, la.block_bytes, 50e9, H200)[0] for la in layers)
    saved = sum(sum(la.gains[:n]) for la, n in zip(layers, quotas, strict=True))
    assert nothing_held - saved <= 1.01 * (nothing_held - exact(layers, budget))


@pytest.mark.parametrize("seed", range(12))
def test_quotas_by_layer_are_never_worse_than_the_same_for_all(seed: int) -> None:
    layers = [demand(i, skewed(seed * 10 + i, 32), 4_000_000) for i in range(6)]
    for each in (4, 12, 20, 28):
        quotas = fill(layers, 6 * each * 4_000_000)
        ours = sum(sum(la.gains[:n]) for la, n in zip(layers, quotas, strict=True))
        uniform = sum(sum(la.gains[:each]) for la in layers)
        assert ours >= uniform
        assert ours > uniform or len(set(quotas)) == 1


def test_a_link_that_is_as_fast_as_can_be_written_hides_every_expert() -> None:
    """No more experts can hide than there are: without that bound a fast link took for ever."""
    reads, block = (0.9, 0.5, 0.25, 0.1), 13_271_040
    device = H200.device_seconds(sum(reads) * block)
    started = time.perf_counter()
    for rate in (1e15, 1e308):
        costs = layer_costs(reads, block, rate, H200)
        assert costs == pytest.approx([device] * 5, rel=1e-6)
    assert time.perf_counter() - started < 0.1


def test_a_slower_link_changes_the_quotas() -> None:
    reads = [skewed(1, 32), [0.3] * 32]
    fast = fill([demand(i, r, 4_000_000, 400e9) for i, r in enumerate(reads)], 150_000_000)
    slow = fill([demand(i, r, 4_000_000, 12e9) for i, r in enumerate(reads)], 150_000_000)
    assert fast != slow


def test_unequal_quotas_read_fewer_distinct_experts_on_real_counts(shared: Path) -> None:
    heat = read_heat(sorted((shared / "routing").glob("layer_*.json"))).heat

    def saved(planned: Heat, served: Heat, rows: int) -> float:
        layers = []
        for number, row in sorted(planned.counts.items()):
            reads = [touched(p, rows) for p in row_probabilities(row, len(row), 6)]
            layers.append(demand(number, reads, 6_635_520, 51e9))

        def distinct(quotas: tuple[int, ...]) -> float:
            total = 0.0
            for layer, held in zip(layers, quotas, strict=True):
                chance = row_probabilities(served.counts[layer.layer], 384, 6)
                cold = choose_homes(layer, held, 0).host
                total += sum(touched(chance[e], rows) for e in cold)
            return total

        quotas = fill(layers, 3 * 268 * 6_635_520)
        return 1 - distinct(quotas) / distinct((268, 268, 268))

    for rows in (1, 4, 6):
        assert saved(heat, heat, rows) >= 0.03
        held_out = [saved(heat.without(t), heat.topic(t), rows) for t in heat.topics]
        assert sum(held_out) / len(held_out) >= 0.03


@pytest.mark.parametrize("shared", [0, 10, 20])
def test_ranks_that_pick_the_same_wait_for_the_later_of_what_each_has_on_its_host(
    shared: int,
) -> None:
    """Half the link, half the experts: ready at once on average, and later in every layer."""
    rng = random.Random(shared)
    read = [rng.uniform(0.05, 0.3) for _ in range(70)]
    fast = tuple(range(40))
    slow = tuple(range(40 - shared, 60 - shared))
    seconds = ((fast, 1.0), (slow, 2.0))
    draws = [
        (
            sum(read[e] for e in cold) * each,
            math.sqrt(sum(read[e] * (1 - read[e]) for e in cold)) * each,
        )
        for cold, each in seconds
    ]
    total = 0.0
    for _ in range(20_000):
        picked = [rng.random() < p for p in read]
        total += max(sum(picked[e] for e in cold) * each for cold, each in seconds)
    expected = slowest(draws, in_common(read, {fast, slow}))
    assert expected == pytest.approx(total / 20_000, rel=0.02)
    assert expected > 1.05 * max(mean for mean, _ in draws)


def test_ranks_with_the_same_experts_on_their_hosts_are_ready_at_once() -> None:
    assert in_common([0.5, 0.25], {(0, 1)}) == 1.0
    assert slowest([(2.0, 1.0), (2.0, 1.0)], 1.0) == 2.0


def test_every_layer_of_expert_parallel_waits_for_the_slowest_rank() -> None:
    """The largest of correlated draws, against 200,000 of them."""
    rng = random.Random(7)
    for draws, correlation in (
        (((1.5, 1.0), (1.5, 1.0)), -1 / 3),
        (((5.2, 1.8), (4.0, 1.2)), -0.2),
        (((3.0, 0.0), (2.0, 0.0)), 0.0),
    ):
        (a, s), (b, t) = draws
        total = 0.0
        for _ in range(200_000):
            x, y = rng.gauss(0, 1), rng.gauss(0, 1)
            other = correlation * x + math.sqrt(1 - correlation**2) * y
            total += max(a + s * x, b + t * other)
        assert slowest(draws, correlation) == pytest.approx(total / 200_000, rel=0.01)
    four = slowest([(2.0, 1.0)] * 4)
    assert four == pytest.approx(2.0 + 1.0294, rel=0.01), "the expected largest of four normals"
