"""P(active) from logs whose truth is known."""

import random
from pathlib import Path

import pytest

from appliance.bench.usage import read_usage, usage
from appliance.errors import UsageError

Spans = list[tuple[float, float]]


def people(count: int, active: float, together: bool, seed: int) -> dict[str, Spans]:
    """Minutes of 200 days of 8 hours; `together`: the whole team is active half of the days."""
    chance = random.Random(seed)
    found: dict[str, Spans] = {str(p): [] for p in range(count)}
    for minute in range(20_000):
        rate = active * (2.0 if (minute // 100) % 2 else 0.0) if together else active
        for spans in found.values():
            if chance.random() < rate:
                spans.append((minute * 60.0, minute * 60.0 + 60.0))
    return found


def test_the_share_of_time_is_found_and_its_interval_holds_it() -> None:
    found = usage(people(20, 0.071, together=False, seed=1))
    assert found.people == 20
    assert found.active == pytest.approx(0.071, abs=0.004)
    assert found.interval[0] <= 0.071 <= found.interval[1]
    assert found.correlation == pytest.approx(0.0, abs=0.005)


def test_hours_that_coincide_show_as_correlation() -> None:
    # Rates 0 and 2p in equal parts: variance of the rate p^2, so rho = p / (1 - p).
    found = usage(people(20, 0.1, together=True, seed=2))
    assert found.correlation == pytest.approx(0.1 / 0.9, abs=0.02)


def test_requests_of_one_person_that_overlap_count_once() -> None:
    found = usage({"a": [(0.0, 60.0), (30.0, 90.0)], "b": [(90.0, 100.0)]})
    assert found.active == pytest.approx((0.9 + 0.1) / 2)


def test_a_log_of_csv_is_read(tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_text("person,start,end\nann,0,10\nbob,5,20\nann,30,40\n")
    assert read_usage(tmp_path / "u.csv") == {"ann": [(0, 10), (30, 40)], "bob": [(5, 20)]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("person,start,end\n", "no requests"),
        ("person,start,end\na,10,5\n", "ends 5 s before"),
        ("who,start,end\na,1,5\n", "person"),
        ("person,start,end\na,1,x\n", "request"),
    ],
)
def test_a_log_that_makes_no_sense_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "u.csv").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_usage(tmp_path / "u.csv")
