"""The paired comparison against scipy, against known truth, and on its edges."""

import math
import random

import numpy as np
import pytest
from accuracy_study import coverage
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from appliance.accuracy.intervals import paired_interval
from appliance.accuracy.paired import compare, mcnemar
from appliance.accuracy.power import items_for_effect, least_items, smallest_effect
from appliance.errors import UsageError


def scores(bits: str) -> dict[str, float]:
    return {str(i): float(bit) for i, bit in enumerate(bits)}


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_is_the_exact_binomial_test(only_a: int, only_b: int) -> None:
    if only_a + only_b == 0:
        assert mcnemar(0, 0) == 1.0
        return
    expected = stats.binomtest(only_a, only_a + only_b, 0.5).pvalue
    assert mcnemar(only_a, only_b) == pytest.approx(expected, rel=1e-9)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    assert 0.93 <= coverage(600, items=150, resamples=400) <= 0.98


def test_grouped_items_widen_the_interval_and_the_standard_error() -> None:
    chance = random.Random(3)
    a, b, groups = {}, {}, {}
    for text in range(30):
        right = float(chance.random() < 0.5)
        for question in range(5):
            name = f"{text}/{question}"
            a[name], b[name], groups[name] = 1.0 - right, right, str(text)
    alone, grouped = compare(a, b), compare(a, b, groups)
    assert grouped.groups == 30 and alone.groups == 150
    # Five equal answers a text carry the news of one: errors grow by sqrt(5).
    assert grouped.standard_error / alone.standard_error == pytest.approx(math.sqrt(5), rel=0.03)
    widths = [r.interval[1] - r.interval[0] for r in (grouped, alone)]
    assert widths[0] / widths[1] == pytest.approx(math.sqrt(5), rel=0.15)
    assert grouped.p_value is None and alone.p_value is not None


def test_the_standard_error_of_single_items_is_the_usual_one() -> None:
    a, b = scores("1101011101"), scores("1001110100")
    delta = np.array([b[i] - a[i] for i in sorted(a)])
    assert compare(a, b).standard_error == pytest.approx(delta.std(ddof=1) / math.sqrt(10))


def test_equal_answers_are_not_inferior_by_as_much_as_their_number_shows_and_a_loss_is() -> None:
    right = scores("1" * 150)
    same = compare(right, right)
    assert (same.difference, same.p_value) == (0.0, 1.0)
    # The score bound without a discordant item: z^2 / (n + z^2).
    assert same.interval == pytest.approx((-3.8415 / 153.8415, 3.8415 / 153.8415), abs=1e-6)
    assert same.not_inferior(0.03) and not same.not_inferior(0.02)
    worse = compare(right, scores("0" * 15 + "1" * 135))
    assert worse.difference == pytest.approx(-0.1)
    assert worse.only_a == 15 and worse.only_b == 0
    assert not worse.not_inferior(0.05) and worse.not_inferior(0.2)


@pytest.mark.parametrize("bits", ["00", "11", "01"])
def test_two_items_show_next_to_nothing(bits: str) -> None:
    """Of a kind that two draws missed there may be 84 %: 0.16 x 0.16 = 2.5 %."""
    found = compare(scores(bits), scores(bits))
    assert found.interval == pytest.approx((-0.8419, 0.8419), abs=1e-4)
    assert not found.not_inferior(0.8)


def test_the_interval_is_tangos_in_his_example_and_in_agrestis() -> None:
    """Tango 1998: 1 of 44 eyes; Agresti 2013, approval ratings: 150 against 86 of 1,600."""
    assert paired_interval(0, 1, 44)[1] == pytest.approx(0.118, abs=5e-4)
    assert paired_interval(150, 86, 1600) == pytest.approx((-0.0590, -0.0214), abs=5e-5)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 60))
def test_the_interval_holds_what_the_score_test_does_not_reject(a: int, b: int, more: int) -> None:
    """Against the likelihood maximised by search over the share that only B got right."""
    n = a + b + more
    for bound in paired_interval(a, b, n):
        if not -0.99 < bound < 0.99:
            continue
        grid = np.linspace(max(bound, 0) + 1e-9, (1 + bound) / 2 - 1e-9, 40001)  # p(B) - p(A)
        other, both = grid - bound, 1 + bound - 2 * grid
        like = b * np.log(grid) + a * np.log(np.maximum(other, 1e-300)) + more * np.log(both)
        share = grid[like.argmax()]
        variance = n * (2 * share - bound - bound**2)
        z = abs(b - a - n * bound) / math.sqrt(variance)
        assert z >= 1.96 - 0.01  # never narrower; wider where few items may have missed a kind


@pytest.mark.parametrize(("items", "truth"), [(10, 0.1), (25, 0.1), (25, 0.0), (60, 0.04)])
def test_few_items_cover_the_truth_too(items: int, truth: float) -> None:
    """Every outcome weighed by its probability: no sampling error."""
    covered = 0.0
    for lost in range(items + 1):
        for won in range(items - lost + 1):
            p = stats.multinomial.pmf(
                [lost, won, items - lost - won], items, [0.02 + truth, 0.02, 0.96 - truth]
            )
            if p > 1e-9:
                low, high = paired_interval(lost, won, items)
                covered += p * (low <= -truth <= high)
    assert covered >= 0.945


def test_groups_that_all_differ_alike_leave_room_for_others() -> None:
    a, b = scores("1100"), scores("1100")
    found = compare(a, b, {"0": "x", "1": "x", "2": "y", "3": "y"})
    assert found.groups == 2 and found.interval == pytest.approx((-0.8419, 0.8419), abs=1e-4)


@pytest.mark.parametrize("margin", [0.5, 0.05, 0.03, 0.01])
def test_the_least_items_are_those_on_which_equal_answers_pass(margin: float) -> None:
    needed = least_items(margin)
    assert -paired_interval(0, 0, needed)[0] < margin <= -paired_interval(0, 0, needed - 1)[0]


def test_a_margin_that_holds_falsely_does_so_in_at_most_one_of_forty() -> None:
    """The true loss is the margin itself: calling it not inferior is the error to bound."""
    chance, passed = np.random.default_rng(4), 0
    for study in range(300):
        kinds = chance.choice([-1, 0, 1], 150, p=[0.08, 0.89, 0.03])
        a = {str(i): float(k != 1) for i, k in enumerate(kinds)}
        b = {str(i): float(k != -1) for i, k in enumerate(kinds)}
        passed += compare(a, b, resamples=400, seed=study).not_inferior(0.05)
    assert passed / 300 <= 0.06  # 2.5 % and three standard errors of 300 studies


def test_the_smallest_effect_is_found_with_the_power_it_states() -> None:
    chance, found = np.random.default_rng(6), 0
    effect = smallest_effect(300, discordant=0.12, power=0.8)
    loss, gain = (0.12 + effect) / 2, (0.12 - effect) / 2
    for study in range(300):
        kinds = chance.choice([-1, 0, 1], 300, p=[loss, 1 - 0.12, gain])
        a = {str(i): float(k != 1) for i, k in enumerate(kinds)}
        b = {str(i): float(k != -1) for i, k in enumerate(kinds)}
        low, high = compare(a, b, resamples=400, seed=study).interval
        found += not low <= 0 <= high
    assert found / 300 == pytest.approx(0.8, abs=0.08)


def test_more_items_show_smaller_effects_and_none_beyond_what_differs() -> None:
    fewest = items_for_effect(0.1)
    assert fewest == 71  # (1.960 + 0.842)^2 x (1 / 0.1 - 1) = 70.6
    assert smallest_effect(fewest - 1, 0.1) is None and smallest_effect(2, 0.08) is None
    effects = [smallest_effect(n, 0.1) for n in (fewest, 150, 1000)]
    assert effects == sorted(effects, reverse=True) and effects[0] <= 0.1


def test_runs_over_other_items_do_not_compare() -> None:
    with pytest.raises(UsageError, match="1 item answered by one"):
        compare(scores("11"), scores("111"))
    with pytest.raises(UsageError, match="in 1 item"):
        compare(scores("1"), scores("1"))
    with pytest.raises(UsageError, match="one group"):
        compare(scores("11"), scores("10"), {"0": "x", "1": "x"})
