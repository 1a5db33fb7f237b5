"""Whether a turn fits in the context that a server holds: what cannot fit is not sent."""

from __future__ import annotations

import math
from dataclasses import dataclass

from appliance.bench.turns import Turn

UNSURE = 1.15  # a text's tokens are known to some ten per cent
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
