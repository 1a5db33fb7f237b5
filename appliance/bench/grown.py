"""Requests of one conversation -> sessions whose history only grows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.bench.turns import Piece, Session, Turn
from appliance.errors import UsageError

Line = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One request of a conversation: tokens, seconds, and the messages of our own recordings."""

    index: int
    input: int
    output: int
    began: float
    ended: float
    messages: tuple[tuple[int, int], ...] = ()


def grown(name: str, rows: Sequence[Row]) -> Iterator[Session]:
    """Sessions whose history only grows."""
    turns: list[Turn] = []
    context, ended, part = 0, rows[0].began, 0
    for row in rows:
        added = row.input - context
        think = max(0.0, row.began - ended)
        if turns and added < 1:  # the history was cut: nothing of it can be taken as equal
            yield Session(f"{name}/{part}", tuple(turns))
            turns, added, part = [], row.input, part + 1
        pieces: tuple[Piece, ...] = (Piece(f"{name}/{part}/{row.index}", added),)
        if not turns and row.messages:
            pieces = _by_message(row)
        turns.append(Turn(pieces, row.output, think))
        context, ended = row.input + row.output, row.ended
    yield Session(f"{name}/{part}" if part else name, tuple(turns))


def _by_message(row: Row) -> tuple[Piece, ...]:
    """The first prompt of a conversation, shared out by characters: equal messages are equal."""
    sizes = [max(1, size) for _, size in row.messages]
    edges = [
        round(row.input * part / sum(sizes)) for part in itertools.accumulate(sizes, initial=0)
    ]
    return tuple(
        Piece(f"message {number}", high - low)
        for (number, _), (low, high) in zip(row.messages, itertools.pairwise(edges), strict=True)
        if high > low
    )


def count(file: Path, number: int, line: Line, key: str, name: str | None = None) -> int:
    value = line.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{file} line {number}: {name or key} is {value!r}, not a count of tokens")
    return int(value)
