"""Seats against scipy's binomial and beta-binomial, and the published seat model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from appliance.bench.seats import more_than, seats
from appliance.errors import UsageError


def test_four_streams_seat_nineteen_people() -> None:
    found = seats(streams=4, active=0.071, risk=0.01)
    assert found.seats == 19
    assert round(found.risk, 4) == 0.0090
    assert round(found.next_risk, 4) == 0.0113


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 200),
    st.floats(0.005, 0.9),
    st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
)
def test_the_tail_agrees_with_scipy(streams: int, people: int, p: float, rho: float) -> None:
    if rho == 0.0:
        expected = stats.binom.sf(streams, people, p)
    else:
        a, b = p * (1 - rho) / rho, (1 - p) * (1 - rho) / rho
        expected = stats.betabinom.sf(streams, people, a, b)
    assert more_than(streams, people, p, rho) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_hours_that_correlate_seat_fewer() -> None:
    found = [seats(4, 0.071, 0.01, rho).seats for rho in (0.0, 0.01, 0.05, 0.2)]
    assert found == sorted(found, reverse=True) and found[-1] < found[0]


def test_correlation_towards_zero_is_the_binomial() -> None:
    assert seats(4, 0.071, 0.01, 1e-7).seats == 19


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 0.1, 0.01, 0.0), "0 streams"),
        ((4, 7.1, 0.01, 0.0), "share of time of 7.1"),
        ((4, 0.0, 0.01, 0.0), "share of time of 0"),
        ((4, 0.1, 1.0, 0.0), "risk of 1"),
        ((4, 0.1, 0.01, 1.0), "correlation of 1"),
    ],
)
def test_impossible_numbers_are_named(
    arguments: tuple[int, float, float, float], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        seats(*arguments)
