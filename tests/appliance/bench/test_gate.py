"""The gate on speed of an upgrade, against servers whose speed is known."""

from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.bench.capacity import Ask, Goal
from appliance.bench.client import Endpoint
from appliance.bench.gate import require_speed
from appliance.bench.measure import Target, measure_turns
from appliance.bench.record import Record, Stamp
from appliance.bench.traces import source
from appliance.bench.turns import Shape, Spread
from appliance.errors import CheckFailed, UsageError

Serve = Callable[[float, float], str]
SHAPE = Shape(
    system_tokens=10,
    turns=Spread(median=4, p95=5, least=2),
    input_tokens=Spread(median=10, p95=20, least=8),
    short_output_tokens=Spread(median=17, p95=18, least=17, most=18),
    long_share=0.0,
)


@pytest.fixture
def before(tmp_path: Path, timed: Serve) -> Path:
    """A record of four streams at 10 ms a token."""
    stamp = Stamp(
        made="2026-11-29T12:00:00Z", release="1", kind="turns", goal=Goal(), model="fine", seed=1,
        shape=SHAPE, text_sha256="t", request={},
    )  # fmt: skip
    record = Record.create(tmp_path / "before", stamp)
    target = Target(
        Endpoint(timed(10.0, 1.0), "fine", extra={}), source(SHAPE, 1, think=False), lambda: None,
        lambda: None, lambda ask, number: None,
    )  # fmt: skip
    measure_turns(record, target, Ask(4, 80, 4))
    return record.folder


def test_the_same_speed_passes_and_its_samples_are_kept(
    before: Path, tmp_path: Path, timed: Serve
) -> None:
    (said,) = require_speed(before, tmp_path / "after", timed(10.0, 1.0), "fine", None, margin=0.5)
    assert said.startswith("p5 of 4 streams changed by ")
    assert sum(map(len, Record(tmp_path / "after").samples.values())) >= 80


def test_a_release_half_as_fast_does_not_pass(before: Path, tmp_path: Path, timed: Serve) -> None:
    with pytest.raises(
        CheckFailed, match=r"p5 of 4 streams changed by -[3-6].*fell by more than 5%"
    ):
        require_speed(before, tmp_path / "after", timed(20.0, 1.0), "fine", None)


def test_a_record_without_a_speed_is_no_baseline(tmp_path: Path, timed: Serve) -> None:
    stamp = Stamp(
        made="", release=None, kind="turns", goal=Goal(), model="m", seed=1, shape=SHAPE,
        text_sha256="t", request={},
    )  # fmt: skip
    Record.create(tmp_path / "b", stamp)
    with pytest.raises(UsageError, match="no speed to compare with"):
        require_speed(tmp_path / "b", tmp_path / "a", timed(5.0, 1.0), "fine", None)
