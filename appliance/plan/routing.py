"""Heat: how often each expert was picked. Never required; a plan without it says so."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import UsageError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Heat:
    """Picks per layer and expert: `counts[layer][expert]`, any non-negative weight.

    A layer that was never seen is absent, which is not the same as all zeros.
    """

    counts: Mapping[int, tuple[float, ...]]

    def __post_init__(self) -> None:
        for layer, row in self.counts.items():
            for expert, value in enumerate(row):
                if not (math.isfinite(value) and value >= 0):
                    raise UsageError(
                        f"the routing counts say {value} for layer {layer} expert {expert}: "
                        "a count is a number of picks, zero or more",
                        fix="record the counts again, or plan without them",
                    )

    def of(self, layer: int) -> tuple[float, ...] | None:
        """Counts of one layer, or None where nothing is known: never seen, or all zero."""
        row = self.counts.get(layer)
        return row if row and any(row) else None

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        layers = {str(i): list(self.counts[i]) for i in sorted(self.counts)}
        return json.dumps({"schema_version": SCHEMA_VERSION, "layers": layers}) + "\n"


def heat_from_json(text: str, source: str = "the routing counts") -> Heat:
    """The inverse of Heat.to_json. Raises UsageError with one sentence."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{source} is not JSON: {error.msg} at line {error.lineno}") from error
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(f"{source} is not a file of routing counts of version {SCHEMA_VERSION}")
    layers = data.get("layers")
    if set(data) != {"schema_version", "layers"} or not isinstance(layers, dict):
        raise UsageError(f"{source} has keys {sorted(data)}: schema_version and layers are known")
    return Heat({_layer_number(key, source): _row(key, row, source) for key, row in layers.items()})


def read_topic_counts(files: Iterable[Path], topics: Iterable[str] | None = None) -> Heat:
    """Heat from files of one layer each: `layer`, `counts` and `counts_<topic>` (384 integers).

    Without topics: the mixed total `counts`; with topics: the sum of those topics' counts.
    """
    wanted = ["counts"] if topics is None else [f"counts_{topic}" for topic in topics]
    out: dict[int, tuple[float, ...]] = {}
    for file in files:
        data = json.loads(file.read_text(encoding="utf-8"))
        missing = [key for key in wanted if key not in data]
        if missing:
            known = sorted(key[7:] for key in data if key.startswith("counts_"))
            raise UsageError(f"{file} has no {missing[0]}; its topics are {', '.join(known)}")
        rows = [_row(key, data[key], str(file)) for key in wanted]
        out[data["layer"]] = tuple(sum(column) for column in zip(*rows, strict=True))
    return Heat(out)


def _layer_number(key: str, source: str) -> int:
    if not key.isdecimal():
        raise UsageError(f"{source}: {key!r} is not a layer number")
    return int(key)


def _row(key: str, row: object, source: str) -> tuple[float, ...]:
    if not isinstance(row, list) or not all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in row
    ):
        raise UsageError(f"{source}: the counts of layer {key} are not a list of numbers")
    return tuple(row)
