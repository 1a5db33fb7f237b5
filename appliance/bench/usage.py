"""How often a person is being answered, and how much people's hours correlate, from usage logs.

A log has one line a request: `person,start,end`, seconds since any moment (CSV with that header),
or AIPerf's profile_export.jsonl (a conversation is taken for a person). A person is active while
one or more of their requests are being answered.
"""

from __future__ import annotations

import csv
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import UsageError

RESAMPLES = 2000
Spans = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Usage:
    """`active`: mean share of the observed time, 0 to 1; `interval`: 95 %, over people; None with
    fewer than two, who say nothing of how people differ.

    `correlation`: of two people's being active at one moment; None with fewer than two people.
    """

    people: int
    seconds: float
    active: float
    interval: tuple[float, float] | None
    correlation: float | None


def read_usage(file: Path) -> dict[str, list[tuple[float, float]]]:
    """Start and end of the requests of each person. Raises UsageError with the line at fault."""
    found: dict[str, list[tuple[float, float]]] = {}
    read = 0
    with file.open(encoding="utf-8", newline="") as handle:
        is_json = handle.read(1) == "{"
        handle.seek(0)
        rows = map(_from_json, handle) if is_json else map(_from_csv, csv.DictReader(handle))
        try:
            for person, start, end in rows:
                if end < start:
                    raise ValueError(f"ends {start - end:g} s before it starts")
                found.setdefault(person, []).append((start, end))
                read += 1
        except (KeyError, TypeError, ValueError) as problem:
            raise UsageError(
                f"{file}, request {read + 1}: {type(problem).__name__} {problem}",
                fix="CSV with the header person,start,end in seconds, or profile_export.jsonl",
            ) from problem
    if not found:
        raise UsageError(f"{file} holds no requests")
    return found


def usage(requests: Mapping[str, Spans], seed: int = 5) -> Usage:
    """From the first request of anybody to the last: that span is all that was observed."""
    begin = min(start for spans in requests.values() for start, _ in spans)
    seconds = max(end for spans in requests.values() for _, end in spans) - begin
    if seconds <= 0:
        raise UsageError("the log spans no time at all", fix="a log of a working day or more")
    busy = {person: _merged(spans) for person, spans in requests.items()}
    shares = [sum(end - start for start, end in spans) / seconds for spans in busy.values()]
    chance = random.Random(seed)
    means = sorted(
        statistics.fmean(chance.choices(shares, k=len(shares))) for _ in range(RESAMPLES)
    )
    edge = round(0.025 * RESAMPLES)
    return Usage(
        people=len(shares),
        seconds=seconds,
        active=statistics.fmean(shares),
        interval=(means[edge - 1], means[-edge]) if len(shares) > 1 else None,
        correlation=_correlation(busy, shares, seconds),
    )


def _correlation(
    busy: Mapping[str, Spans], shares: Sequence[float], seconds: float
) -> float | None:
    """Intra-class: how much the variance of the number active exceeds the binomial's."""
    n, p = len(shares), statistics.fmean(shares)
    if n < 2 or not 0 < p < 1:
        return None
    changes = sorted(
        [(start, 1) for spans in busy.values() for start, _ in spans]
        + [(end, -1) for spans in busy.values() for _, end in spans]
    )
    active, squares, before = 0, 0.0, changes[0][0]
    for when, step in changes:
        squares += active**2 * (when - before)
        active, before = active + step, when
    variance = squares / seconds - (n * p) ** 2
    return min(0.99, max(0.0, (variance / (n * p * (1 - p)) - 1) / (n - 1)))


def _merged(spans: Spans) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _from_csv(row: Mapping[str, str]) -> tuple[str, float, float]:
    return row["person"], float(row["start"]), float(row["end"])


def _from_json(line: str) -> tuple[str, float, float]:
    about = json.loads(line)["metadata"]
    times = about["request_start_ns"] / 1e9, about["request_end_ns"] / 1e9
    return str(about["conversation_id"]), *times
