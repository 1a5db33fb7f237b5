"""Streams driven against a server of known timing; samples kept, read back, counted."""

import dataclasses
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bench.capacity import Ask
from appliance.bench.client import Endpoint
from appliance.bench.load import Load
from appliance.bench.samples import Sample, from_json, problems
from appliance.bench.traces import read_trace
from appliance.bench.turns import Shape, Spread, sessions, unthinking
from appliance.errors import ServeError, UsageError

Serve = Callable[[float, float], str]
SMALL = Shape(
    system_tokens=50,
    turns=Spread(median=3, p95=5, least=2),
    input_tokens=Spread(median=20, p95=60, least=8),
    short_output_tokens=Spread(median=24, p95=40, least=17),
    long_share=0.0,
)


def loaded(url: str, kept: list[Sample], model: str = "fine") -> Load:
    endpoint = Endpoint(url, model, None, 20.0)
    return Load(endpoint, map(unthinking, sessions(SMALL, 1)), kept.append)


def test_every_stream_runs_its_share_and_the_speed_is_the_servers(timed: Serve) -> None:
    kept: list[Sample] = []
    speeds = loaded(timed(5.0, 5.0), kept).run(Ask(streams=4, turns=10, warm_turns=4))
    counted = [s for s in kept if s.role == "counted"]
    assert len(counted) == len(speeds) == 12  # ten, shared out equally over four
    assert {s.stream for s in counted} == {0, 1, 2, 3}
    assert sum(s.role == "warm" for s in kept) == 4
    assert statistics.median(speeds) == pytest.approx(200.0, rel=0.05)
    assert all(s.output_tokens == s.asked_tokens for s in counted)
    assert problems(counted) in ({}, {"stall": 1}, {"stall": 2})


def test_by_time_every_stream_counts_what_it_began_in_time_and_at_least_one(timed: Serve) -> None:
    url, kept = timed(2.0, 1.0), []  # about 60 ms a turn
    began = time.monotonic()
    loaded(url, kept).run(Ask(streams=3, turns=10**6, warm_turns=3, seconds=1.0))
    assert time.monotonic() - began < 4
    by_stream = Counter(s.stream for s in kept if s.role == "counted")
    assert set(by_stream) == {0, 1, 2} and min(by_stream.values()) >= 3
    loaded(url, kept := []).run(Ask(streams=2, turns=10**6, warm_turns=2, seconds=0.0))
    assert Counter(s.stream for s in kept if s.role == "counted") == {0: 1, 1: 1}


def test_the_history_grows_with_the_answers(timed: Serve) -> None:
    kept: list[Sample] = []
    loaded(timed(1.0, 1.0), kept).run(Ask(streams=1, turns=6, warm_turns=0))
    by_session: dict[str, list[Sample]] = {}
    for sample in kept:
        by_session.setdefault(sample.session, []).append(sample)
    assert any(len(rows) > 1 for rows in by_session.values())
    for rows in by_session.values():
        for before, after in itertools.pairwise(rows):
            assert before.input_tokens is not None and after.input_tokens is not None
            assert before.output_tokens is not None
            assert after.input_tokens > before.input_tokens + before.output_tokens - 1


def test_a_server_that_refuses_everything_is_an_error_with_its_name(timed: Serve) -> None:
    with pytest.raises(ServeError, match="all of 2 turns at 2 streams failed: http-429"):
        loaded(timed(1.0, 1.0), [], "http-429").run(Ask(2, 2, 0))


def test_missing_usage_is_counted_and_gives_no_speed(timed: Serve) -> None:
    kept: list[Sample] = []
    assert loaded(timed(1.0, 1.0), kept, "no-usage").run(Ask(1, 3, 0)) == []
    assert problems(kept)["no-usage"] == 3


def sample(**changes: object) -> Sample:
    made = Sample("s", 0, 0, 1, 0, 0, "counted", 1.0, 20, output_tokens=20, gaps=(0.01,) * 19)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_speed_is_unknown_for_short_answers_and_zero_for_failed_ones() -> None:
    assert sample().speed == pytest.approx(100.0)
    assert sample(output_tokens=15).speed is None
    assert sample(output_tokens=None).speed is None
    assert sample(error="reset").speed == 0.0


def test_an_answer_that_came_at_once_is_counted_by_name() -> None:
    at_once = sample(gaps=(0.0,) * 19)
    assert at_once.speed is None and problems([at_once]) == {"one-piece": 1}
    assert problems([sample(output_tokens=3)]) == {"too-short": 1}


def test_a_stall_is_long_in_itself_and_against_the_turn() -> None:
    assert sample(gaps=(0.01,) * 18 + (0.25,)).stalls == 1
    assert sample(gaps=(0.01,) * 18 + (0.15,)).stalls == 0
    assert sample(gaps=(0.3,) * 19).stalls == 0


@given(
    st.lists(st.integers(0, 10**9).map(lambda ns: ns / 1e9), max_size=5),
    st.none() | st.integers(0, 10**6),
    st.sampled_from([None, "reset", "http-429"]),
    st.sampled_from(["warm", "counted", "extra"]),
)
def test_a_sample_written_is_the_sample_read(
    gaps: list[float], tokens: int | None, error: str | None, role: str
) -> None:
    made = sample(gaps=tuple(gaps), output_tokens=tokens, error=error, role=role, detail=error)
    back = from_json(made.to_json())
    assert back == made


def test_our_samples_are_a_trace_that_can_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(sample(input_tokens=30).to_json() + "\n")
    (session,) = read_trace(file)
    assert session.turns[0].pieces[0].tokens == 30 and session.turns[0].output_tokens == 20


def test_a_foreign_line_is_refused_and_shown() -> None:
    with pytest.raises(UsageError, match="not a sample of ours"):
        from_json('{"metadata": {}, "metrics": {}, "error": null}')
