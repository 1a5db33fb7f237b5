"""Contexts against a server that reads at a known rate, with a cache and without one."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.bench.capacity import Goal
from appliance.bench.client import Endpoint
from appliance.bench.context import lengths_to, measure_context
from appliance.bench.context_report import at_lengths, beside, cached, prefix_check
from appliance.bench.context_text import context_lines
from appliance.bench.measure import Target
from appliance.bench.record import BLOCKS, Lengths, Record, Stamp
from appliance.bench.traces import source
from appliance.bench.turns import Shape
from appliance.errors import ServeError

Serve = Callable[[float, float], str]
LENGTHS = Lengths(
    contexts=(500, 1000, 2000), repeats=2, output=20, beside=8000, prefix=2000, users=(1, 2)
)


def measured(folder: Path, url: str, model: str, lengths: Lengths = LENGTHS) -> Record:
    stamp = Stamp(
        made="2026-11-29T12:00:00Z", release="1", kind="context", goal=Goal(), model=model, seed=1,
        shape=Shape(), text_sha256="t", request={}, lengths=lengths,
    )  # fmt: skip
    record = Record.create(folder, stamp)
    target = Target(
        Endpoint(url, model, extra={}), source(Shape(), 1, think=False), lambda: None,
        lambda: None, lambda ask, number: None,
    )  # fmt: skip
    measure_context(record, target)
    return record


def test_what_a_context_costs_is_what_the_server_takes(tmp_path: Path, timed: Serve) -> None:
    record = measured(tmp_path / "r", timed(2.0, 1.0), "cache")
    check = prefix_check(record)
    assert check is not None and check.works and check.source == "usage"
    assert check.cached is not None and check.input_tokens is not None
    assert check.cached > 0.9 * check.input_tokens
    rows = at_lengths(record)
    for row in rows:
        assert row.turns == 2 and row.input_tokens is not None and row.first_token is not None
        assert row.input_tokens == pytest.approx(
            row.asked_tokens * 0.94 - 20, rel=0.35
        )  # words, not tokens
        # 0.1 ms a word, and 1 ms; a busy machine may be late, never early.
        assert 0 <= row.first_token - 1e-4 * row.input_tokens - 1e-3 < 0.25
        assert row.per_token is not None and 1.8e-3 < row.per_token < 6e-3
    together = beside(record)
    assert together is not None and together.read_seconds is not None
    assert together.read_seconds > 0.6
    # Tokens come three times as far apart while the fourth reads.
    assert statistics.median(together.during) < 0.6 * statistics.median(together.alone)
    assert together.longest_gap is not None and together.longest_gap > 2e-3
    shared = cached(record)
    assert [row.users for row in shared] == [1, 2] and [row.turns for row in shared] == [2, 4]
    assert all(row.cached_share is not None and row.cached_share > 0.9 for row in shared)
    assert all(row.first_token_p95 is not None and row.first_token_p95 < 0.1 for row in shared)
    assert list(context_lines(Record(tmp_path / "r"))) == list(context_lines(record))


def test_a_server_that_caches_nothing_is_found_out(tmp_path: Path, timed: Serve) -> None:
    record = measured(tmp_path / "r", timed(2.0, 1.0), "no-cache")
    check = prefix_check(record)
    assert check is not None and check.works is False
    assert "does NOT work" in next(context_lines(record))


def test_where_nobody_counts_it_is_unknown(tmp_path: Path, timed: Serve) -> None:
    record = measured(tmp_path / "r", timed(2.0, 1.0), "fine")
    check = prefix_check(record)
    assert check is not None and check.works is None
    assert "unknown" in next(context_lines(record))


def test_a_measurement_that_was_cut_off_continues_with_what_is_missing(
    tmp_path: Path, timed: Serve
) -> None:
    url = timed(2.0, 1.0)
    measured(tmp_path / "r", url, "cache")
    blocks = (tmp_path / "r" / BLOCKS).read_text().splitlines(keepends=True)
    (tmp_path / "r" / BLOCKS).write_text("".join(blocks[:4]))
    again = measured(tmp_path / "r", url, "cache")
    parts = [json.loads(line)["part"] for line in blocks]
    assert [block.part for block in again.blocks] == parts
    assert (tmp_path / "r" / BLOCKS).read_text().startswith("".join(blocks[:4]))


def test_a_server_without_usage_is_refused(tmp_path: Path, timed: Serve) -> None:
    with pytest.raises(ServeError, match="no prompt_tokens"):
        measured(tmp_path / "r", timed(2.0, 1.0), "no-usage")


def test_lengths_double_up_to_the_longest() -> None:
    assert lengths_to(4096, 262144).contexts == tuple(4096 << k for k in range(7))
    assert lengths_to(4096, 5000).contexts == (4096, 5000)
    assert lengths_to(300, 300).contexts == (300,)
    assert lengths_to(4096, 65536).beside == 65536
