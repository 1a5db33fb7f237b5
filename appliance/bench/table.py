"""The answer from a table that somebody measured: streams, median, p5."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.bench.capacity import Goal
from appliance.errors import UsageError


@dataclass(frozen=True)
class Row:
    """Speeds in tokens per second and stream; `p5_at_least` is None where nobody bounded it."""

    streams: int
    median: float
    p5: float
    p5_at_least: float | None = None


@dataclass(frozen=True)
class Answer:
    """`unmeasured`: numbers of streams between the answer and the first row that fails."""

    streams: int
    unmeasured: tuple[int, ...]
    at_limit: bool


def answer(rows: Sequence[Row], goal: Goal) -> Answer:
    """The most streams measured to hold the goal, below the first row that does not."""
    holds = 0
    for row in sorted(rows, key=lambda row: row.streams):
        if row.p5 < goal.threshold:
            return Answer(holds, tuple(range(holds + 1, row.streams)), at_limit=False)
        holds = row.streams
    return Answer(holds, (), at_limit=True)


def read_table(file: Path) -> list[Row]:
    """JSON: [{"streams": 1, "median": 186, "p5": 134}, ...]. Raises UsageError on anything else."""
    try:
        found = json.loads(file.read_text())
        rows = [Row(int(r["streams"]), float(r["median"]), float(r["p5"])) for r in found]
    except (ValueError, KeyError, TypeError) as problem:
        raise UsageError(
            f"{file} is not a table of speeds: {type(problem).__name__} {problem}",
            fix='a JSON list of {"streams": 1, "median": 186, "p5": 134}',
        ) from problem
    if not rows:
        raise UsageError(f"{file} has no rows", fix='[{"streams": 1, "median": 186, "p5": 134}]')
    return rows
