"""What of a prefill is multiplied together, and in which order: decided on the host, launched by
prefill.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from expert_kernels import launch


class Piece(NamedTuple):
    """`rows` picks of one expert, from row `at` of its group."""

    expert: int
    at: int
    rows: int


def groups(counts: Sequence[int], limit: int) -> list[list[Piece]]:
    """Picks sorted by expert, cut into groups of at most `limit` rows."""
    out: list[list[Piece]] = []
    room = 0
    for expert, count in enumerate(counts):
        while count:
            if room == 0:
                out.append([])
                room = limit
            rows = min(count, room)
            out[-1].append(Piece(expert, limit - room, rows))
            room -= rows
            count -= rows
    return out


def cut(piece: Piece) -> list[Piece]:
    """A piece as pieces of as many rows as one block of the fused products takes."""
    step = launch.PIECE_ROWS
    return [
        Piece(piece.expert, piece.at + skip, min(step, piece.rows - skip))
        for skip in range(0, piece.rows, step)
    ]


class Run(NamedTuple):
    """Pieces of a group that go together: in one launch, or one expert made dense.

    `batch` is waited for before (None: in device memory), and released after if this is its `last`.
    """

    pieces: list[Piece]
    dense: bool
    batch: int | None = None
    last: bool = False


def runs(group: Sequence[Piece], batch_of: dict[int, int], ends: dict[int, Piece]) -> list[Run]:
    """What is launched for a group, in order. `ends`: the last piece of each batch."""
    out: list[Run] = []
    together: dict[int, list[Piece]] = {}
    for piece in group:
        together.setdefault(batch_of.get(piece.expert, -1), []).append(piece)
    for batch, mine in sorted(together.items()):
        few = [p for p in mine if p.rows < launch.DENSE_ROWS]
        made = [Run([q for p in few for q in cut(p)], False)] if few else []
        made += [Run([p], True) for p in mine if p.rows >= launch.DENSE_ROWS]
        if batch >= 0:
            last = any(p is ends[batch] for p in mine)
            made = [Run(r.pieces, r.dense, batch, last and r is made[-1]) for r in made]
        out += made
    return out


def steps(count: int, window: int) -> Iterator[tuple[int, bool]]:
    """(group, its host experts?): a group's device experts go `window` - 1 groups ahead of them."""
    for index in range(count + window - 1):
        if index < count:
            yield index, False
        if index >= window - 1:
            yield index - window + 1, True
