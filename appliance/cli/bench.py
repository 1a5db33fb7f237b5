"""bench turns, capacity, report, compare, plot: what one stream feels, and how many hold it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from appliance import render
from appliance.cli.loads import (
    Headroom,
    KeyFile,
    Load,
    Model,
    NoIgnoreEos,
    Out,
    RecordPath,
    Seed,
    ShapeFile,
    TargetSpeed,
    TraceFile,
    Url,
)
from appliance.errors import UsageError

group = typer.Typer(help="Measure what a user feels.", no_args_is_help=True, rich_markup_mode=None)


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
    load = Load(seed, shape, trace, think=False)
    to_server = load.fitting(found)
    record = Record.create(out, load.stamp("capacity", goal, found))
    answer = measure_capacity(record, to_server)
    render.lines(report_lines(record))
    return 0 if answer.streams else 3


@group.command()
def turns(
    streams: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Streams at once; several in turns.")
    ] = "4",
    count: Annotated[
        int | None, typer.Option("--turns", min=1, help="Turns at each (default 120).")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Or for so long in all, over every N.")
    ] = None,
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
    """Run agent turns at fixed numbers of streams. Again: more blocks in the same record.

    Exit code 3 where a number of streams has no turn whose speed can be said.
    """
    from appliance.bench.capacity import Ask, Goal
    from appliance.bench.measure import TURNS, measure_turns, measure_until
    from appliance.bench.record import Record
    from appliance.bench.report import report_lines, require_speeds
    from appliance.cli.measured import find

    began = time.monotonic()
    numbers = _numbers(streams)
    if count is not None and seconds is not None:
        raise UsageError("--turns and --seconds exclude each other", fix="leave one out")
    found = find(url, model, key_file, ignore_eos=not stop_at_end)
    load = Load(seed, shape, trace, think=think)
    to_server = load.fitting(found)
    record = Record.create(out, load.stamp("turns", Goal(), found))
    if seconds is None:
        asks = (Ask(n, count or TURNS, n) for n in numbers)
        measure_turns(record, to_server, *asks)
    else:
        measure_until(record, to_server, numbers, end=began + seconds)
    render.lines(report_lines(record))
    require_speeds(record, numbers)


def _numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(f"{text!r} are no numbers of streams", fix="--streams 1,2,4,6")
    return found


@group.command()
def report(
    record: RecordPath,
    svg: Annotated[Path | None, typer.Option(help="Also draw it here.", metavar="FILE")] = None,
) -> None:
    """What a record says, computed again from its samples."""
    from appliance.bench.context_text import context_lines
    from appliance.bench.plot import plot_lines, plot_svg
    from appliance.bench.record import Record
    from appliance.bench.report import report as reported
    from appliance.bench.report import report_lines, require_speeds
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
    require_speeds(loaded, [block.ask.streams for block in loaded.blocks])


@group.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Record before.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Record after.")],
) -> None:
    """What changed from record A to record B, with 95 % intervals."""
    from appliance.bench.compare import compare_lines
    from appliance.bench.record import Record

    render.lines(compare_lines(Record(a), Record(b)))
