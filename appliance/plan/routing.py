"""Heat: how often each expert was picked, in all and by topic. Never required."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from appliance.errors import UsageError

SCHEMA_VERSION = 1
Counts = Mapping[int, tuple[float, ...]]  # by layer, then by expert


@dataclass(frozen=True)
class Heat:
    """Picks per layer and expert: `counts[layer][expert]`, any non-negative weight.

    A layer that was never seen is absent, which is not the same as all zeros. `topics` holds the
    parts of `counts` whose subject is known; they tell which experts are hot whatever the subject.
    """

    counts: Counts
    topics: Mapping[str, Counts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, part in {"": self.counts, **self.topics}.items():
            where = f"topic {name}, " if name else ""
            for layer, row in part.items():
                _refuse_bad_row(row, f"{where}layer {layer}")
                whole = self.counts.get(layer)
                if whole is None or len(whole) != len(row):
                    has = len(whole or ())
                    raise UsageError(
                        f"the routing counts of {where}layer {layer} have {len(row)} experts, "
                        f"the total has {has}"
                    )

    def of(self, layer: int) -> tuple[float, ...] | None:
        """Counts of one layer, or None where nothing is known: never seen, or all zero."""
        row = self.counts.get(layer)
        return row if row and any(row) else None

    def steady(self, layer: int) -> tuple[float, ...] | None:
        """Each expert's share of the picks in the topic that wants it least; None as in `of`.

        An expert that is hot in every topic is worth a permanent place; one that is hot in a few
        belongs in a slot. Without topics: its share of all picks.
        """
        rows = [part[layer] for part in self.topics.values() if any(part.get(layer, ()))]
        whole = self.of(layer)
        if whole is None:
            return None
        shares = [_shares(row) for row in rows or [whole]]
        return tuple(map(min, zip(*shares, strict=True)))

    def topic(self, name: str) -> Heat:
        """One topic as a Heat of its own. Raises UsageError for a topic that is not known."""
        if name not in self.topics:
            known = ", ".join(sorted(self.topics)) or "none"
            raise UsageError(f"there are no counts of topic {name!r}; known topics: {known}")
        return Heat(self.topics[name], {name: self.topics[name]})

    def without(self, name: str) -> Heat:
        """Everything but one topic: what a plan made before that topic came would have known."""
        gone = self.topic(name).counts
        counts = {
            layer: tuple(map(_rest, row, gone.get(layer, (0.0,) * len(row))))
            for layer, row in self.counts.items()
        }
        return Heat(counts, {n: part for n, part in self.topics.items() if n != name})

    def scaled(self, factor: float) -> Heat:
        """Every count times `factor`: 0.5 lets what was seen before count half (decay)."""
        return Heat(_scale(self.counts, factor),
                    {name: _scale(part, factor) for name, part in self.topics.items()})  # fmt: skip

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        topics = {name: _plain(self.topics[name]) for name in sorted(self.topics)}
        data = {"schema_version": SCHEMA_VERSION, "layers": _plain(self.counts), "topics": topics}
        return json.dumps(data) + "\n"


def merge(heats: Sequence[Heat]) -> Heat:
    """The sum of counts, layer by layer and topic by topic."""
    names = sorted({name for heat in heats for name in heat.topics})
    return Heat(
        _add([heat.counts for heat in heats]),
        {name: _add([h.topics[name] for h in heats if name in h.topics]) for name in names},
    )


def mix(heat: Heat, weights: Mapping[str, float]) -> Heat:
    """A traffic of known topics in given parts, e.g. {"rust": 3, "english": 1}."""
    parts = []
    for name, weight in weights.items():
        part = heat.topic(name)
        picks = max(sum(row) for row in part.counts.values())
        parts.append(part.scaled(weight / picks))
    return merge(parts)


def heat_from_json(text: str, source: str = "the routing counts") -> Heat:
    """The inverse of Heat.to_json. Raises UsageError with one sentence."""
    data = parse_json(text, source)
    if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"{source} is not a file of routing counts of version {SCHEMA_VERSION}",
            fix="give counts of this engine, topic counts, an expert-load dump, or a router trace",
        )
    topics = data.get("topics", {})
    if not set(data) <= {"schema_version", "layers", "topics"} or not isinstance(topics, dict):
        raise UsageError(f"{source} has keys {sorted(data)}: schema_version, layers and topics "
                         "are known")  # fmt: skip
    return Heat(_counts(data.get("layers"), source),
                {name: _counts(part, source) for name, part in topics.items()})  # fmt: skip


def parse_json(text: str, source: str) -> object:
    """One JSON value. Raises UsageError with the name of what it was read from."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        what = str(error)
    except ValueError:  # more digits than Python converts
        what = "a number of thousands of digits"
    except RecursionError:
        what = "it is nested too deeply"
    raise UsageError(
        f"{source} is not JSON: {what}", fix="record the counts again, or plan without them"
    )


def count_row(row: object, where: str) -> tuple[float, ...]:
    """A list of numbers as counts. Raises UsageError on anything else."""
    if not isinstance(row, list) or not all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in row
    ):
        raise UsageError(f"{where}: the counts are not a list of numbers")
    return tuple(row)


def _counts(layers: object, source: str) -> Counts:
    if not isinstance(layers, dict) or not all(key.isdecimal() for key in layers):
        raise UsageError(f"{source}: layers must be a table from layer numbers to counts")
    return {int(key): count_row(row, f"{source}, layer {key}") for key, row in layers.items()}


def _refuse_bad_row(row: Sequence[float], where: str) -> None:
    again = "record the counts again, or plan without them"
    for expert, value in enumerate(row):
        if not 0 <= value <= sys.float_info.max:  # so is NaN
            raise UsageError(
                f"the routing counts say {str(value)[:20]} for {where} expert {expert}: "
                "a count is a number of picks, zero or more",
                fix=again,
            )
    if not sum(row) <= sys.float_info.max:
        raise UsageError(f"the routing counts of {where} add up to no number", fix=again)


def _shares(row: Sequence[float]) -> list[float]:
    total = sum(row)
    return [value / total for value in row]


def _rest(whole: float, part: float) -> float:
    return max(0.0, whole - part)


def _scale(part: Counts, factor: float) -> Counts:
    return {layer: tuple(v * factor for v in row) for layer, row in part.items()}


def _add(parts: Sequence[Counts]) -> Counts:
    out: dict[int, tuple[float, ...]] = {}
    for part in parts:
        for layer, row in part.items():
            before = out.get(layer, (0.0,) * len(row))
            if len(before) != len(row):
                raise UsageError(f"layer {layer} has {len(before)} experts in one file of counts "
                                 f"and {len(row)} in another")  # fmt: skip
            out[layer] = tuple(map(sum, zip(before, row, strict=True)))
    return out


def _plain(part: Counts) -> dict[str, list[float]]:
    return {str(layer): list(part[layer]) for layer in sorted(part)}
