"""Heat from what others write: topic counts, router traces (JSONL, CSV), expert-load dumps."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from appliance.errors import UsageError
from appliance.plan.routing import Heat, count_row, heat_from_json, merge, parse_json

# An engine warms up on one made-up token: the same choice over and over, or equal weights.
WARM_UP_RUN = 8
MOST_EXPERTS = 100_000  # of a layer, as in config.json


@dataclass(frozen=True, slots=True)
class HeatFile:
    """Counts, and what had to be said about them."""

    heat: Heat
    notes: tuple[str, ...] = ()


def read_heat(files: Iterable[Path], experts: int | None = None) -> HeatFile:
    """Counts of any known format, told apart by content; several files are added up.

    `experts`: experts a layer has; a trace alone shows only those it picked.
    Raises UsageError with the file's name.
    """
    read = [_read(file, experts) for file in files]
    if not read:
        raise UsageError("no file of routing counts is given")
    return HeatFile(merge([r.heat for r in read]), tuple(n for r in read for n in r.notes))


def read_rows(file: Path) -> dict[int, list[tuple[int, ...]]]:
    """The rows of a trace in their order, by layer, warm-up left out: to be replayed.

    Raises UsageError for a file that is not a trace, and for one that is all warm-up.
    """
    if file.suffix not in (".csv", ".jsonl"):
        raise UsageError(f"{file} holds counts, not rows: only a trace (.jsonl, .csv) has an order")
    trace = _Trace()
    for layer, ids, weights in _rows(file, _text(file)):
        trace.add(layer, ids, weights)
    trace.close()
    if not trace.kept:
        raise _all_warm_up(file, trace.rows)
    return trace.kept


@dataclass(slots=True)
class _Trace:
    """Rows of one trace; consecutive equal choices of a layer wait until they are told apart."""

    kept: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    runs: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    rows: int = 0
    dropped: int = 0

    def add(self, layer: int, ids: tuple[int, ...], weights: tuple[float, ...]) -> None:
        self.rows += 1
        if len(weights) > 1 and len(set(weights)) == 1:
            self.dropped += 1
            return
        last, length = self.runs.get(layer, ((), 0))
        if ids == last:
            self.runs[layer] = (ids, length + 1)
            return
        self._settle(layer)
        self.runs[layer] = (ids, 1)

    def close(self) -> None:
        for layer in self.runs:
            self._settle(layer)

    def _settle(self, layer: int) -> None:
        ids, length = self.runs.get(layer, ((), 0))
        if not ids:
            return
        if length >= WARM_UP_RUN:
            self.dropped += length
            return
        self.kept.setdefault(layer, []).extend([ids] * length)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(
            f"cannot read the routing counts {file}: {why}",
            fix="give a file of counts or a trace, or plan without --heat",
        ) from error


def _rows(file: Path, text: str) -> Iterator[tuple[int, tuple[int, ...], tuple[float, ...]]]:
    return _csv_rows(file, text) if file.suffix == ".csv" else _jsonl_rows(file, text)


def _all_warm_up(file: Path, rows: int) -> UsageError:
    return UsageError(
        f"{file}: all {rows:,} rows are warm-up (one choice repeated, or equal weights)",
        fix="record real requests, or plan without counts",
    )


def _read(file: Path, experts: int | None) -> HeatFile:
    text = _text(file)
    if file.suffix in (".csv", ".jsonl"):
        return _from_rows(file, _rows(file, text), experts)
    data = parse_json(text, str(file))
    if isinstance(data, dict) and "counts" in data:
        return HeatFile(_topic_counts(file, data))
    if isinstance(data, dict) and ("weight" in data or "logical_count" in data):
        return HeatFile(_load_dump(file, data.get("weight", data.get("logical_count"))))
    if isinstance(data, list):
        return HeatFile(_load_dump(file, data))
    return HeatFile(heat_from_json(text, str(file)))


def _topic_counts(file: Path, data: Mapping[str, object]) -> Heat:
    """One layer: `layer`, `counts`, and `counts_<topic>`; topics outside the total are added."""
    layer = data.get("layer")
    if type(layer) is not int or layer < 0:
        raise UsageError(f"{file} does not say which layer its counts are of")
    total = count_row(data["counts"], str(file))
    outside = data.get("topics_outside_counts", [])
    if not isinstance(outside, list) or any(f"counts_{name}" not in data for name in outside):
        raise UsageError(f"{file} names topics outside the total, {outside!a}, that it does not "
                         "count")  # fmt: skip
    topics = {
        key.removeprefix("counts_"): {layer: count_row(row, f"{file}, {key}")}
        for key, row in data.items()
        if key.startswith("counts_")
    }
    added = [Heat(topics[name]) for name in outside]
    return Heat(merge([Heat({layer: total}), *added]).counts, topics)


def _load_dump(file: Path, rows: object) -> Heat:
    """Expert loads as a load balancer keeps them: one list per MoE layer, in order."""
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"{file} is not a table of loads by layer and expert")
    return Heat({i: count_row(row, f"{file}, layer {i}") for i, row in enumerate(rows)})


def _from_rows(
    file: Path, rows: Iterator[tuple[int, tuple[int, ...], tuple[float, ...]]], experts: int | None
) -> HeatFile:
    trace = _Trace()
    for layer, ids, weights in rows:
        trace.add(layer, ids, weights)
    trace.close()
    if not trace.kept:
        raise _all_warm_up(file, trace.rows)
    width = experts or 1 + max(e for rows in trace.kept.values() for row in rows for e in row)
    if width > MOST_EXPERTS:
        raise UsageError(f"{file} picks expert {width - 1:,}: no layer has so many")
    counts = {layer: [0.0] * width for layer in trace.kept}
    for layer, kept in trace.kept.items():
        for expert in (e for row in kept for e in row):
            if expert >= width:
                raise UsageError(f"{file}: layer {layer} picks expert {expert}, and a layer has "
                                 f"{width}")  # fmt: skip
            counts[layer][expert] += 1
    heat = Heat({layer: tuple(row) for layer, row in counts.items()})
    if not trace.dropped:
        return HeatFile(heat)
    note = f"{file.name}: {trace.dropped:,} of {trace.rows:,} rows are warm-up and were dropped"
    return HeatFile(heat, (note,))


def _jsonl_rows(file: Path, text: str) -> Iterator[tuple[int, tuple[int, ...], tuple[float, ...]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if row.get("type", "route") != "route":
                continue
            layer, ids = row["layer"], tuple(row["topk_ids"])
            weights = tuple(map(float, row.get("topk_weights", ())))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{file}, line {number}: not a routed row ({error!r})") from error
        _refuse_odd_row(file, number, layer, ids)
        yield layer, ids, weights


def _csv_rows(file: Path, text: str) -> Iterator[tuple[int, tuple[int, ...], tuple[float, ...]]]:
    """`layer,"12 7 40"`, with or without a header."""
    for number, row in enumerate(csv.reader(text.splitlines()), 1):
        if not row or (number == 1 and row[0].strip().isidentifier()):
            continue
        try:
            layer, ids = int(row[0]), tuple(int(e) for e in row[1].split())
        except (ValueError, IndexError) as error:
            raise UsageError(f"{file}, line {number}: not layer,experts") from error
        _refuse_odd_row(file, number, layer, ids)
        yield layer, ids, ()


def _refuse_odd_row(file: Path, number: int, layer: object, ids: Sequence[object]) -> None:
    """A row is a layer and the experts it picked, all of them whole numbers from 0."""
    for value in (layer, *ids):
        if type(value) is not int or value < 0:
            raise UsageError(f"{file}, line {number}: {value!a} is no number of a layer or expert")
