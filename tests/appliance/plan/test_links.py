"""Unequal links: what is divided is the time of reading, and no other division is shorter."""

import random

import pytest

from appliance.plan.links import divide, seconds_by_count
from appliance.plan.placement import LayerDemand

BLOCK = 1000


def demand(layer: int, heat: list[float]) -> LayerDemand:
    gains = tuple(sorted((h * BLOCK for h in heat), reverse=True))
    experts = tuple(range(len(heat)))
    return LayerDemand(layer, experts, BLOCK, tuple(heat), tuple(heat), gains)


def test_seconds_are_those_of_the_coldest_experts_that_no_slot_holds() -> None:
    layers = [demand(0, [8.0, 4.0, 2.0, 1.0]), demand(1, [0.5, 0.5, 0.5, 0.5])]
    plain = seconds_by_count(layers, rate=1000.0, slots=0)
    assert plain == pytest.approx([0, 0.5, 1, 1.5, 2, 3, 5, 9, 17])
    # One slot a layer: the hottest of its experts on the host costs nothing.
    slots = seconds_by_count(layers, rate=1000.0, slots=1)
    assert slots == pytest.approx([0, 0, 0.5, 1, 1.5, 1.5, 2.5, 4.5, 8.5])


@pytest.mark.parametrize("seed", range(30))
def test_no_other_division_of_the_same_experts_is_ready_sooner(seed: int) -> None:
    rng = random.Random(seed)
    rows = [[rng.paretovariate(1.2) for _ in range(6)] for _ in range(2)]
    layers = [demand(i, row) for i, row in enumerate(rows)]
    seconds = [seconds_by_count(layers, rate, rng.choice([0, 1])) for rate in (50e3, 25e3, 10e3)]
    total = rng.randint(0, 36)
    counts = divide(total, seconds)
    assert sum(counts) == total
    longest = max(row[n] for row, n in zip(seconds, counts, strict=True))
    every = (
        max(seconds[0][i], seconds[1][j], seconds[2][total - i - j])
        for i in range(13)
        for j in range(13)
        if 0 <= total - i - j <= 12
    )
    assert longest == pytest.approx(min(every))


def test_of_skewed_traffic_the_faster_link_gets_less_than_its_speeds_share_of_experts() -> None:
    heat = [1.0 / (1 + rank) for rank in range(200)]
    seconds = [seconds_by_count([demand(0, heat)], rate, 0) for rate in (50e3, 25e3)]
    fast, slow = divide(120, seconds)
    assert slow < fast < 2 * slow
    assert seconds[0][fast] == pytest.approx(seconds[1][slow], rel=0.1)
