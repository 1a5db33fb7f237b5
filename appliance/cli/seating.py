"""capacity seats, capacity table: from streams to people, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance import render
from appliance.errors import UsageError

group = typer.Typer(
    help="How many people so many streams seat.", no_args_is_help=True, rich_markup_mode=None
)


@group.command()
def seats(
    streams: Annotated[int, typer.Option(help="Streams that hold the target.")],
    active: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Of a person's time: 7.1% or 0.071.")
    ] = None,
    usage: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Or estimate it from this log.")
    ] = None,
    risk: Annotated[
        str, typer.Option(metavar="SHARE", help="Of a moment with more people than streams.")
    ] = "1%",
    correlation: Annotated[
        float | None, typer.Option(help="Between two people's hours, 0 to 1 (0: binomial).")
    ] = None,
) -> None:
    """The most people who share the streams at a stated risk that somebody has to wait."""
    from appliance.bench.seats import seats as seated

    if (active is None) == (usage is None):
        raise UsageError("give --active or --usage, one of them", fix="--active 7.1%")
    if active is not None:
        found = seated(streams, share(active), share(risk), correlation or 0.0)
        render.data(str(found.seats))
        render.say(
            f"P(more than {streams} active): {found.risk:.2%} with {found.seats} people, "
            f"{found.next_risk:.2%} with one more"
        )
    elif usage is not None:
        _from_log(streams, usage, share(risk), correlation)


def _from_log(streams: int, log: Path, risk: float, correlation: float | None) -> None:
    from appliance.bench.seats import seats as seated
    from appliance.bench.usage import read_usage
    from appliance.bench.usage import usage as estimated

    found = estimated(read_usage(log))
    rho = correlation if correlation is not None else found.correlation or 0.0
    who = f"{render.counted(found.people, 'person', 'people')} over "
    who += f"{render.duration(found.seconds)}: active {found.active:.2%}"
    if found.interval is None:
        render.say(f"{who} of the time; how people differ cannot be seen in one")
        render.data(str(seated(streams, found.active, risk, rho).seats))
        return
    low, high = found.interval
    render.say(f"{who} [{low:.2%}, {high:.2%}] of the time, correlation {rho:.3f}")
    answers = [seated(streams, p, risk, rho).seats for p in (high, found.active, low)]
    render.data(str(answers[1]))
    render.say(f"{answers[0]} to {answers[2]} people over that interval")


@group.command()
def table(
    file: Annotated[Path, typer.Argument(help="JSON rows of streams, median, p5.", metavar="FILE")],
    target: Annotated[float, typer.Option(help="Tokens per second and stream.")] = 40.0,
    headroom: Annotated[float, typer.Option(help="p5 must reach the target times this.")] = 1.1,
) -> int:
    """The most streams that hold the target, from a table that somebody measured."""
    from appliance.bench.capacity import Goal
    from appliance.bench.plot import plot_lines
    from appliance.bench.table import answer, read_table

    goal, rows = Goal(target, headroom), read_table(file)
    found = answer(rows, goal)
    for line in plot_lines(rows, goal.threshold):
        render.say(line)
    if found.unmeasured:
        render.say(f"not measured: {', '.join(map(str, found.unmeasured))} streams")
    if found.at_limit:
        render.say("every row holds: more streams were not measured")
    render.data(str(found.streams))
    return 0 if found.streams else 3


def share(text: str) -> float:
    """0.071 from `7.1%` or `0.071`."""
    number, percent, rest = text.partition("%")
    try:
        value = float(number)
    except ValueError:
        value, rest = 0.0, text
    if rest.strip():
        raise UsageError(f"{text!r} is no share", fix="7.1% or 0.071")
    return value / 100 if percent else value
