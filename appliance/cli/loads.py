"""What the commands of `bench` take in common: the server, and the load that it is given."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import render
from appliance.errors import UsageError

if TYPE_CHECKING:
    from appliance.bench.capacity import Ask, Goal
    from appliance.bench.measure import Target
    from appliance.bench.record import Lengths, Stamp
    from appliance.bench.turns import Shape
    from appliance.cli.measured import Measured

Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the record.", metavar="DIR")]
RecordPath = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a record.")]
# Named, as whatever has its own name for metavar: some releases of typer would call it --URL.
Url = Annotated[
    str | None,
    typer.Option("--url", help="Another OpenAI-compatible server, up to /v1.", metavar="URL"),
]
Model = Annotated[str | None, typer.Option(help="The model's name there.", metavar="NAME")]
KeyFile = Annotated[Path | None, typer.Option(help="File with its API key.", metavar="FILE")]
Seed = Annotated[int, typer.Option(help="Other sessions for another number.")]
ShapeFile = Annotated[
    Path | None, typer.Option("--shape", help="Lengths of turns as JSON.", metavar="FILE")
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="A Mooncake or AIPerf trace.", metavar="FILE")
]
TargetSpeed = Annotated[float, typer.Option(help="Tokens per second and stream.")]
Headroom = Annotated[float, typer.Option(help="p5 must reach the target times this.")]
NoIgnoreEos = Annotated[
    bool, typer.Option("--stop-at-end", help="Let answers end early (servers without ignore_eos).")
]


class Load:
    """What is sent: sessions of a shape by seed, or of a trace."""

    def __init__(self, seed: int, shape: Path | None, trace: Path | None, *, think: bool) -> None:
        from appliance.bench.traces import read_trace
        from appliance.bench.turns import Shape, read_shape

        if shape is not None and trace is not None:
            raise UsageError("--shape and --trace exclude each other", fix="leave one out")
        self.seed, self.think = seed, think
        self.shape: Shape = Shape() if shape is None else read_shape(shape)
        self.trace = None if trace is None else read_trace(trace)
        self.trace_sha256 = (
            None if trace is None else hashlib.sha256(trace.read_bytes()).hexdigest()
        )

    def stamp(
        self, kind: str, goal: Goal, found: Measured, lengths: Lengths | None = None
    ) -> Stamp:
        from appliance.bench.record import Stamp
        from appliance.bench.text import corpus

        return Stamp.model_validate(
            {
                "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "release": release(),
                "kind": kind,
                "goal": goal,
                "model": found.endpoint.model,
                "seed": self.seed,
                "think": self.think,
                "shape": self.shape,
                "trace_sha256": self.trace_sha256,
                "lengths": lengths,
                "context_tokens": found.context_tokens() if lengths is None else None,
                "text_sha256": hashlib.sha256(corpus().encode()).hexdigest(),
                "request": dict(found.endpoint.extra),
                "host_digest": found.host_digest,
                "plan_digest": found.plan_digest,
                "image_digest": found.image_digest,
            }
        )

    def target(self, found: Measured) -> Target:
        from appliance.bench.measure import Target
        from appliance.bench.traces import source

        sessions = source(self.shape, self.seed, think=self.think, trace=self.trace)
        return Target(found.endpoint, sessions, found.counters, found.engine, _said())

    def fitting(self, found: Measured) -> Target:
        """The target, with sessions that end before the turn that the server cannot hold."""
        from appliance.bench.load import room_of
        from appliance.bench.room import next_that_fits

        held = found.context_tokens()
        if held is None:
            return self.target(found)
        render.say(f"the server holds {held:,} tokens: a session ends before a turn beyond that")
        target = replace(self.target(found), room=room_of(found.endpoint, held))
        next_that_fits(target.sessions("look"), target.room)  # refused before a record is begun
        return target


def release() -> str | None:
    """The version of this package; None where it runs from a checkout that is not installed."""
    try:
        return version("moe-appliance")
    except PackageNotFoundError:
        return None


def _said() -> Callable[[Ask, int], None]:
    began = time.monotonic()

    def say(ask: Ask, number: int) -> None:
        after = render.duration(time.monotonic() - began)
        asked = render.counted(ask.turns, "turn") if ask.seconds is None else f"{ask.seconds:g} s"
        what = f"{asked} over {render.counted(ask.streams, 'stream')}"
        render.say(f"[{after}] run {number}: {what}")

    return say
