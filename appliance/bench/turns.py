"""Agent turns: sessions shaped like coding agents, the same for the same seed.

A session opens with a system prompt and tools that all sessions share. Each turn appends a tool
result or a question to a growing history, thinks, and asks for a short or a long answer. Lengths
are log-normal, stated as a median and a 95th percentile. The defaults are assumptions, not
measurements of anybody's traffic: change them with a file (`Shape`), or import a trace.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from appliance.errors import UsageError

Z95 = 1.6449  # standard normal, 95th percentile
Share = Annotated[float, Field(ge=0, le=1)]


class Spread(BaseModel):
    """A log-normal length or time, cut off at `least` and `most`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    median: Annotated[float, Field(gt=0)]
    p95: Annotated[float, Field(gt=0)]
    least: float = 0.0
    most: float | None = None

    def draw(self, chance: random.Random) -> float:
        sigma = math.log(self.p95 / self.median) / Z95
        drawn = self.median * math.exp(chance.gauss(0.0, sigma))
        drawn = max(drawn, self.least)
        return drawn if self.most is None else min(drawn, self.most)


class Shape(BaseModel):
    """Lengths in tokens, times in seconds. `long_share` of the answers are long."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    system_tokens: Annotated[int, Field(ge=0)] = 3000
    turns: Spread = Spread(median=12, p95=40, least=1, most=200)
    input_tokens: Spread = Spread(median=400, p95=4000, least=8, most=20_000)
    short_output_tokens: Spread = Spread(median=80, p95=250, least=32, most=500)
    long_output_tokens: Spread = Spread(median=500, p95=1500, least=200, most=4000)
    long_share: Share = 0.2
    think_seconds: Spread = Spread(median=2.0, p95=30.0, most=300.0)
    most_context_tokens: Annotated[int, Field(gt=0)] = 128_000


@dataclass(frozen=True)
class Piece:
    """So many tokens of input. Equal keys are equal text, so a server may find them cached."""

    key: str
    tokens: int


@dataclass(frozen=True)
class Turn:
    """What is appended to the history, how much is asked for, and the wait before it is sent."""

    pieces: tuple[Piece, ...]
    output_tokens: int
    think_seconds: float = 0.0


@dataclass(frozen=True)
class Session:
    """One conversation: each turn is sent with all that went before it."""

    name: str
    turns: tuple[Turn, ...]


def sessions(shape: Shape, seed: int | str) -> Iterator[Session]:
    """Sessions without end; a seed never shares more than the system prompt with another."""
    for number in itertools.count():
        yield _session(shape, random.Random(f"{seed}/{number}"), f"{seed}-{number}")


def unthinking(session: Session) -> Session:
    """The same turns, each sent as soon as the one before is answered: a stream never idles."""
    return replace(session, turns=tuple(replace(t, think_seconds=0.0) for t in session.turns))


def _session(shape: Shape, chance: random.Random, name: str) -> Session:
    turns: list[Turn] = []
    context = shape.system_tokens
    for index in range(round(shape.turns.draw(chance))):
        wanted = round(shape.input_tokens.draw(chance))
        is_long = chance.random() < shape.long_share
        spread = shape.long_output_tokens if is_long else shape.short_output_tokens
        output = round(spread.draw(chance))
        think = shape.think_seconds.draw(chance)
        if context + wanted + output > shape.most_context_tokens:
            break
        context += wanted + output
        pieces: tuple[Piece, ...] = (Piece(f"{name}/{index}", wanted),)
        if index == 0 and shape.system_tokens:
            pieces = (Piece("system", shape.system_tokens), *pieces)
        turns.append(Turn(pieces, output, think))
    if not turns:
        raise UsageError(
            f"a first turn does not fit in {shape.most_context_tokens:,} tokens of context",
            fix="a larger most_context_tokens, or shorter system_tokens and input_tokens",
        )
    return Session(name, tuple(turns))


def read_shape(file: Path) -> Shape:
    """A Shape from JSON; what is left out keeps its default. Raises UsageError."""
    try:
        return Shape.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        known = ", ".join(Shape.model_fields)
        raise UsageError(f"{file}: {where}: {first['msg']}", fix=f"known: {known}") from error
