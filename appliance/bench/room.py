"""Whether a turn fits in the context that a server holds: what cannot fit is not sent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.bench.turns import Session, Turn
from appliance.errors import UsageError

UNSURE = 1.15  # a text's tokens are known to some ten per cent
MOST_SKIPPED = 1000  # sessions in a row whose first turn does not fit
AROUND = 32  # tokens of a chat template around what one turn adds


@dataclass(frozen=True)
class Room:
    """`context_tokens`: what the server holds; `per_token`: its tokens for one of ours."""

    context_tokens: int
    per_token: float

    def fits(self, used: int, turn: Turn) -> bool:
        """After a history of `used` tokens, by the server's count."""
        return used + self.added(turn) + turn.output_tokens <= self.context_tokens

    def added(self, turn: Turn) -> int:
        """Tokens that the input of a turn takes at most, as the server counts them."""
        ours = sum(piece.tokens for piece in turn.pieces)
        return math.ceil(ours * self.per_token * UNSURE) + AROUND


def next_that_fits(sessions: Iterator[Session], room: Room | None) -> Session:
    """The next one whose first turn fits. Raises UsageError where that is none of very many."""
    smallest = math.inf
    for _ in range(MOST_SKIPPED):
        session = next(sessions)
        first = session.turns[0]
        if room is None or room.fits(0, first):
            return session
        smallest = min(smallest, room.added(first) + first.output_tokens)
    assert room is not None
    raise UsageError(
        f"the server holds {room.context_tokens:,} tokens, and the shortest first turn of "
        f"{MOST_SKIPPED:,} sessions may take {smallest:,} ({room.per_token:.1f} of its tokens for "
        "one of the shape's)",
        fix='--shape FILE with shorter turns, such as {"system_tokens": '
        f"{max(0, round(room.context_tokens / room.per_token / 10))}}}, "
        "or `appliance up --context N`",
    )
