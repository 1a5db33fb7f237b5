"""plan make, trade, show, ledger, explain, diff, simulate, picture: a plan without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import durable, render
from appliance.cli import options
from appliance.plan.request import Policy
from appliance.settings import read_settings

if TYPE_CHECKING:
    from appliance.plan.model import Plan
    from preflight import Host

group = typer.Typer(
    help="Which expert lives where, and why.", no_args_is_help=True, rich_markup_mode=None
)
HERE = Path("plan.json")
HANGING = 9
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")]
# `explain` and `picture` took it so before it was an argument of theirs, too.
OldPlan = Annotated[Path | None, typer.Option("--plan", hidden=True)]
Machine = Annotated[
    Path | None,
    typer.Option("--host", help="Plan for this recorded machine instead.", metavar="DIR"),
]


@group.command()
@options.takes_policy
def make(
    model: Annotated[Path, typer.Option(help="Folder of an EXL3 checkpoint.", metavar="DIR")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write.")] = HERE,
    host: Machine = None,
    *,
    policy: Policy,
    heat: options.HeatFiles = None,
) -> None:
    """Read the headers and the machine, give every expert a home, write plan.json."""
    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.plan.explain import show_lines
    from appliance.plan.planner import plan as make_plan

    counts = options.heat(heat)
    with render.Progress("reading the checkpoint and the machine, planning"):
        checkpoint = read_checkpoint(model.absolute())
        made = make_plan(_machine(host), checkpoint, counts, policy)
    made.write(out)
    for warning in checkpoint.warnings:
        render.say(f"warning: {warning}")
    for line in render.wrapped(show_lines(made), HANGING):
        render.say(line)
    render.data(str(out))


@group.command()
@options.takes_policy
def trade(
    model: Annotated[Path, typer.Option(help="Folder of an EXL3 checkpoint.", metavar="DIR")],
    host: Machine = None,
    *,
    policy: Policy,
    heat: options.HeatFiles = None,
) -> None:
    """The same cards split otherwise: context against experts, slots against host memory.

    Writes no plan. "cold": picks on the host as the counts have them; "left out": of a topic that
    the plan does not know, once its slots have settled.
    """
    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.plan.trade import trade_lines

    counts = options.heat(heat)
    render.lines(trade_lines(_machine(host), read_checkpoint(model.absolute()), counts, policy))


def _machine(host: Path | None) -> Host:
    """The recorded machine, else this one with the rates that were kept."""
    from appliance.cli.serving import files_of
    from appliance.serve.measured import with_kept_rates

    machine = options.machine(host)
    return machine if host is not None else with_kept_rates(machine, files_of(read_settings()))


def plan_in(path: Path) -> Plan:
    """The plan in a file. Where none is named and none is here, the error names the other one."""
    from appliance.errors import PlanError
    from appliance.plan.model import load_plan

    if path == HERE and not path.exists():
        raise PlanError(f"there is no {HERE} in {Path.cwd()}", fix=_another_plan())
    return load_plan(path)


def _another_plan() -> str:
    from appliance.cli.serving import files_of
    from appliance.errors import ApplianceError
    from appliance.serve.state import read_state

    files = files_of(read_settings())
    try:
        last = read_state(files)
    except ApplianceError:
        last = None  # a damaged state is for `status` to say
    served = files.plan if last is None else last.plan
    if not served.exists():
        return "appliance plan make --model DIR writes one"
    running = last is not None and last.supervisor_is_running
    what = "the running appliance's plan" if running else "the plan that `up` made or served last"
    return f"name a file: {what} is {served}"


def own_plan_lines(made: Plan, path: Path, *, written: bool) -> Iterator[str]:
    """That `up` planned by itself, and that a plan of this model in this folder is not served."""
    from appliance.errors import PlanError
    from appliance.plan.model import load_plan

    where = f"written to {path}" if written else "not written"
    yield f"no --plan is given: planned anew, {where}"
    try:
        here = load_plan(HERE)
    except PlanError:
        return
    if here.made_from.checkpoint == made.made_from.checkpoint and here.digest != made.digest:
        yield (
            f"note: {HERE} in this folder is another plan of this model and is not served: "
            f"`appliance up --plan {HERE}` serves it"
        )


@group.command()
def show(plan: PlanPath = HERE, json: options.Json = False) -> None:
    """A plan on one screen."""
    from appliance.plan.explain import show_lines

    loaded = plan_in(plan)
    if json:
        render.as_json(loaded.model_dump(mode="json"))
    else:
        render.lines(render.wrapped(show_lines(loaded), HANGING))


@group.command()
def ledger(plan: PlanPath = HERE) -> None:
    """Every byte of every rank, and whether all experts would have fitted."""
    from appliance.plan.explain import ledger_lines

    render.lines(ledger_lines(plan_in(plan)))


@group.command()
def explain(
    layer: int,
    expert: int,
    plan: PlanPath = HERE,
    heat: options.HeatFiles = None,
    named: OldPlan = None,
) -> None:
    """Where one expert lives, and why."""
    from appliance.plan.explain import explain as explained

    words = explained(plan_in(named or plan), layer, expert, options.heat(heat))
    render.lines(render.wrapped([words], 0))


@group.command()
def diff(old: PlanPath, new: PlanPath) -> None:
    """Which experts moved between two plans of a model, and what that changes."""
    from appliance.plan.compare import diff_lines

    render.lines(render.wrapped(diff_lines(plan_in(old), plan_in(new)), 2))


@group.command()
def simulate(
    plan: PlanPath = HERE,
    heat: options.HeatFiles = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay this router trace (.jsonl, .csv) in its order.", metavar="FILE"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows a step.", metavar="N")] = 4,
    seed: Annotated[
        list[str] | None,
        typer.Option("--seed", help="Same seed, same draws (default 1).", metavar="SEED"),
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option("--held-out", help="Serve each topic on a plan like this, made without it."),
    ] = False,
) -> None:
    """Replay traffic on a plan: picks that wait on the host, by rule for the spare slots.

    --heat draws rows of each topic in the counts; --trace replays recorded ones. --held-out draws
    more: topics alone, mixed and one after another; --seed twice or more gives a range.
    """
    from appliance.errors import UsageError
    from appliance.plan.heat_files import read_rows
    from appliance.plan.held_out_table import held_out_lines, study_of
    from appliance.plan.simulate_plan import simulate_lines, trace_lines

    loaded, counts, seeds = plan_in(plan), options.heat(heat), seed or ["1"]
    if trace is not None and counts is not None:
        raise UsageError("both --heat and --trace: the rows come from one of them")
    if held_out and counts is None:
        raise UsageError("--held-out leaves topics of counts out", fix="--heat FILE with topics")
    if len(seeds) > 1 and not held_out:
        raise UsageError(f"{len(seeds)} seeds are given: only --held-out takes several")
    if trace is not None:
        render.lines(trace_lines(loaded, read_rows(trace), batch))
    elif counts is not None and held_out:
        render.lines(held_out_lines(study_of(loaded, counts), seeds))
    elif counts is not None:
        with render.Progress(f"replaying {batch} rows a step"):
            lines = simulate_lines(loaded, counts, batch, seeds[0])
        render.lines(lines)
    else:
        raise UsageError(
            "there is no traffic to replay", fix="--heat FILE with counts, or --trace FILE"
        )


@group.command()
def picture(
    file: Annotated[Path, typer.Argument(metavar="FILE.html", help="Where to write the page.")],
    plan: PlanPath = HERE,
    heat: options.HeatFiles = None,
    named: OldPlan = None,
) -> None:
    """One page that needs nothing else: expert map, ledger, speed; with counts, heat beneath."""
    from appliance.plan.picture import page

    drawn = page(plan_in(named or plan), options.heat(heat))
    with durable.naming(file):
        file.write_text(drawn, encoding="utf-8")
    render.data(str(file))
