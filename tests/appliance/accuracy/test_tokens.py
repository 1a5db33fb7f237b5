"""Divergence and agreement token by token, against distributions that are known whole."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from appliance.accuracy.tokens import TOP, Listed, compare_tokens, divergence, listed, token_lines


def distribution(seed: int, size: int) -> dict[str, float]:
    chance = random.Random(seed)
    weights = [chance.expovariate(1.0) ** 3 for _ in range(size)]
    return {str(i): w / sum(weights) for i, w in enumerate(weights)}


def logs(p: dict[str, float], count: int) -> dict[str, float]:
    return {k: math.log(v) for k, v in sorted(p.items(), key=lambda kv: -kv[1])[:count]}


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(2, 60), st.integers(1, 60))
def test_lists_cut_short_never_say_more_than_the_truth(
    a: int, b: int, size: int, count: int
) -> None:
    p, q = distribution(a, size), distribution(b, size)
    true = float(stats.entropy(list(p.values()), list(q.values())))
    assert -1e-12 <= divergence(logs(p, count), logs(q, count)) <= true + 1e-6
    assert divergence(logs(p, size), logs(q, size)) == pytest.approx(true, rel=1e-6, abs=1e-6)
    assert divergence(logs(p, count), logs(p, count)) == pytest.approx(0.0, abs=1e-9)


def position(token: str, p: dict[str, float]) -> Listed:
    return token, logs(p, TOP)


def test_positions_count_up_to_where_the_answers_part() -> None:
    p, q = {"x": 0.6, "y": 0.4}, {"x": 0.4, "y": 0.6}
    a = {"one": [position("x", p)] * 6, "two": [position("x", p)] * 2, "only a": []}
    b = {
        "one": [position("x", p), position("x", p), position("y", q), position("x", p)],
        "two": [position("x", p)] * 2,
    }
    found = compare_tokens(a, b)
    assert found is not None
    assert (found.items, found.positions) == (2, 5)
    assert found.same_top == pytest.approx(4 / 5)
    expected = 0.6 * math.log(1.5) + 0.4 * math.log(2 / 3)
    assert found.divergence == pytest.approx(expected / 5)
    assert [(r.first, r.positions) for r in found.ranges] == [(0, 2), (1, 3)]
    low, high = found.same_top_interval or (0, 0)
    assert low <= found.same_top <= high
    assert len(list(token_lines(found))) == 3


def test_without_lists_nothing_is_said() -> None:
    assert compare_tokens({}, {"x": [position("x", {"x": 1.0})]}) is None
    assert listed({"message": {}}) is None
    assert listed({"logprobs": {"content": []}}) is None
    content = [{"token": "a", "top_logprobs": [{"token": "a", "logprob": -0.1}]}]
    assert listed({"logprobs": {"content": content}}) == [("a", {"a": -0.1})]
