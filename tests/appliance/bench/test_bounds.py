"""Rank bounds against scipy, and against their own definition."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from appliance.bench.bounds import (
    lower_bound,
    lower_rank,
    quantile,
    upper_bound,
    upper_rank,
)


@settings(deadline=None)
@given(st.integers(1, 2500), st.sampled_from([0.05, 0.5]), st.sampled_from([0.95, 0.99375]))
def test_a_rank_is_the_best_that_keeps_its_confidence(n: int, share: float, level: float) -> None:
    low, high = lower_rank(n, share, level), upper_rank(n, share, level)
    if low is not None:
        assert stats.binom.sf(low - 1, n, share) >= level - 1e-9
    assert stats.binom.sf(low or 0, n, share) < level + 1e-9
    if high is not None:
        assert stats.binom.cdf(high - 1, n, share) >= level - 1e-9
        assert high == 1 or stats.binom.cdf(high - 2, n, share) < level + 1e-9


def test_58_turns_are_too_few_for_a_bound_on_p5_and_59_give_the_slowest() -> None:
    assert lower_bound([40.0] * 58) is None
    assert lower_bound([float(50 - i) for i in range(59)]) == -8.0
    assert upper_bound([1.0, 2.0]) is not None


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(1, 100), min_size=59, max_size=400))
def test_the_estimate_is_a_sample_and_lies_between_its_bounds(speeds: list[float]) -> None:
    low, high = lower_bound(speeds), upper_bound(speeds)
    assert low is not None and high is not None
    assert low <= quantile(speeds) <= high
    assert quantile(speeds) in speeds
    assert sum(s <= quantile(speeds) for s in speeds) >= math.ceil(0.05 * len(speeds) - 1e-9)
