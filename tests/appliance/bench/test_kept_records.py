"""Records measured elsewhere and kept with the repository still read, and report what they did."""

from pathlib import Path

import pytest

from appliance.bench.context_text import context_lines
from appliance.bench.record import Record
from appliance.bench.report import report_lines

KEPT = Path(__file__).parents[3] / "docs" / "measurements" / "raw" / "transformers-serve"


@pytest.mark.parametrize("name", ["turns", "context"])
def test_a_record_of_another_server_replays_to_the_report_of_the_day(name: str) -> None:
    record = Record(KEPT / name)
    lines = context_lines(record) if name == "context" else report_lines(record)
    assert list(lines) == (KEPT / f"{name}.txt").read_text().splitlines()
