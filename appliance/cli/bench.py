"""bench turns, capacity, report, compare, plot: what one stream feels, and how many hold it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
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

group = typer.Typer(help="Measure what a user feels.", no_args_is_help=True, rich_markup_mode=None)
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the record.", metavar="DIR")]
RecordPath = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a record.")]
Url = Annotated[
    str | None, typer.Option(help="Another OpenAI-compatible server, up to /v1.", metavar="URL")
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


@group.command()
def capacity(
    out: Out = Path("capacity"),
    target: TargetSpeed = 40.0,
    headroom: Headroom = 1.1,
    most: Annotated[int, typer.Option(help="Try no more streams than this.")] = 64,
    url: Url = None,
    model: Model = None,
    key_file: KeyFile = None,
    seed: Seed = 1,
    shape: ShapeFile = None,
    trace: TraceFile = None,
    stop_at_end: NoIgnoreEos = False,
) -> int:
    """Find the most streams whose p5 speed holds the target. Again after a restart: another start.

    Exit code 3 where not even one stream holds it.
    """
    from appliance.bench.capacity import Goal
    from appliance.bench.measure import measure_capacity
    from appliance.bench.record import Record
    from appliance.bench.report import report_lines
    from appliance.cli.measured import find

    goal = Goal(target, headroom, most)
    found = find(url, model, key_file, ignore_eos=not stop_at_end)
    load = _Load(seed, shape, trace, think=False)
    record = Record.create(out, load.stamp("capacity", goal, found))
    answer = measure_capacity(record, load.target(found))
    render.lines(report_lines(record))
    return 0 if answer.streams else 3


@group.command()
def turns(
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 4,
    count: Annotated[int, typer.Option("--turns", min=1, help="Turns in all.")] = 120,
    think: Annotated[
        bool, typer.Option("--think", help="Wait between turns, as people do.")
    ] = False,
    out: Out = Path("turns"),
    url: Url = None,
    model: Model = None,
    key_file: KeyFile = None,
    seed: Seed = 1,
    shape: ShapeFile = None,
    trace: TraceFile = None,
    stop_at_end: NoIgnoreEos = False,
) -> None:
    """Run agent turns at a fixed number of streams. Again: another block in the same record."""
    from appliance.bench.capacity import Ask, Goal
    from appliance.bench.measure import measure_turns
    from appliance.bench.record import Record
    from appliance.bench.report import report_lines
    from appliance.cli.measured import find

    found = find(url, model, key_file, ignore_eos=not stop_at_end)
    load = _Load(seed, shape, trace, think=think)
    record = Record.create(out, load.stamp("turns", Goal(), found))
    measure_turns(record, load.target(found), Ask(streams, count, streams))
    render.lines(report_lines(record))


@group.command()
def context(
    least: Annotated[int, typer.Option("--from", min=64, help="Shortest prompt, tokens.")] = 4096,
    most: Annotated[
        int | None, typer.Option("--to", help="Longest (default: what the server holds).")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 3,
    beside: Annotated[
        int, typer.Option(help="Tokens a fourth stream reads beside three.")
    ] = 131072,
    out: Out = Path("context"),
    url: Url = None,
    model: Model = None,
    key_file: KeyFile = None,
    seed: Seed = 1,
    stop_at_end: NoIgnoreEos = False,
) -> int:
    """Speed against context, first reads, cached prefixes. Exit code 3 without prefix caching."""
    from appliance.bench.capacity import Goal
    from appliance.bench.context import lengths_to, measure_context
    from appliance.bench.context_report import context_lines, prefix_check
    from appliance.bench.record import Record
    from appliance.cli.measured import find

    found = find(url, model, key_file, ignore_eos=not stop_at_end)
    longest = most or found.context_tokens()
    if longest is None:
        raise UsageError("the server does not say how long a context it holds", fix="--to TOKENS")
    lengths = lengths_to(min(least, longest), longest, repeats=repeats, beside=beside)
    load = _Load(seed, None, None, think=False)
    record = Record.create(out, load.stamp("context", Goal(), found, lengths))
    measure_context(record, load.target(found))
    render.lines(context_lines(record))
    check = prefix_check(record)
    return 3 if check is not None and check.works is False else 0


@group.command()
def report(
    record: RecordPath,
    svg: Annotated[Path | None, typer.Option(help="Also draw it here.", metavar="FILE")] = None,
) -> None:
    """What a record says, computed again from its samples."""
    from appliance.bench.context_report import context_lines
    from appliance.bench.plot import plot_lines, plot_svg
    from appliance.bench.record import Record
    from appliance.bench.report import report as reported
    from appliance.bench.report import report_lines
    from appliance.bench.table import Row

    loaded = Record(record)
    if loaded.stamp.kind == "context":
        render.lines(context_lines(loaded))
        return
    render.lines(report_lines(loaded))
    rows = [Row(line.streams, line.median, line.p5) for line in reported(loaded).lines]
    if rows:
        render.lines(plot_lines(rows, loaded.stamp.goal.threshold))
    if svg is not None:
        if not rows:
            raise UsageError(f"{record} holds no speed to draw")
        svg.write_text(plot_svg(rows, loaded.stamp.goal.threshold))


@group.command()
def compare(a: RecordPath, b: RecordPath) -> None:
    """What changed from record A to record B, with 95 % intervals."""
    from appliance.bench.compare import compare_lines
    from appliance.bench.record import Record

    render.lines(compare_lines(Record(a), Record(b)))


class _Load:
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
                "release": _release(),
                "kind": kind,
                "goal": goal,
                "model": found.endpoint.model,
                "seed": self.seed,
                "think": self.think,
                "shape": self.shape,
                "trace_sha256": self.trace_sha256,
                "lengths": lengths,
                "text_sha256": hashlib.sha256(corpus().encode()).hexdigest(),
                "request": dict(found.endpoint.extra),
                "host_digest": found.host_digest,
                "plan_digest": found.plan_digest,
            }
        )

    def target(self, found: Measured) -> Target:
        from appliance.bench.measure import Target
        from appliance.bench.traces import source

        sessions = source(self.shape, self.seed, think=self.think, trace=self.trace)
        return Target(found.endpoint, sessions, found.counters, found.engine, _said())


def _release() -> str | None:
    """The version of this package; None where it runs from a checkout that is not installed."""
    try:
        return version("moe-appliance")
    except PackageNotFoundError:
        return None


def _said() -> Callable[[Ask, int], None]:
    began = time.monotonic()

    def say(ask: Ask, number: int) -> None:
        after = render.duration(time.monotonic() - began)
        render.say(f"[{after}] run {number}: {ask.turns} turns over {ask.streams} streams")

    return say
