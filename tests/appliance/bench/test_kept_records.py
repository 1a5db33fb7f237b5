"""Records measured elsewhere and kept with the repository still read, and report what they did."""

from pathlib import Path

import pytest

from appliance.bench.context_text import context_lines
from appliance.bench.record import Record
from appliance.bench.report import report_lines

RAW = Path(__file__).parents[3] / "docs" / "measurements" / "raw"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("transformers-serve", "turns"),
        ("transformers-serve", "context"),
        ("cpu-engine-three-starts", "turns"),
    ],
)
def test_a_kept_record_replays_to_the_report_of_its_day(folder: str, name: str) -> None:
    kept = RAW / folder
    record = Record(kept / name)
    lines = context_lines(record) if name == "context" else report_lines(record)
    assert list(lines) == (kept / f"{name}.txt").read_text().splitlines()
