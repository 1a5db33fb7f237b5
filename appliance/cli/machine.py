"""preflight: is this machine good enough, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import render
from appliance.cli import options

if TYPE_CHECKING:
    from preflight import Host, Needs

group = typer.Typer(
    help="Look at this machine: will it serve well, and what to change.", rich_markup_mode=None
)


@group.callback(invoke_without_command=True)
def preflight(
    context: typer.Context,
    host: Annotated[
        Path | None, typer.Option(help="Judge this recorded machine instead.", metavar="DIR")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Judge by what this plan needs.", metavar="FILE")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Plan this model, judge by that plan.", metavar="DIR")
    ] = None,
    gpus: Annotated[int, typer.Option(help="Cards wanted before there is a plan; 0: none.")] = 1,
    ignore: options.Ignore = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Also keep what was seen, serials blanked.", metavar="DIR"),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")] = False,
    json: options.Json = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="A textfile for node_exporter on stdout.")
    ] = False,
) -> int:
    """Exit code 0: ready; 3: a check failed; 4: only warnings (3 with --strict)."""
    from appliance.errors import UsageError
    from preflight import check
    from preflight.report import UnknownCheck
    from preflight.report import prometheus as textfile

    if context.invoked_subcommand is not None:
        return 0
    with render.Progress("looking at the machine"):
        seen = options.machine(host, record)
    try:
        report = check(seen, _needs(seen, plan, model, gpus), ignore or ())
    except UnknownCheck as error:
        raise UsageError(str(error)) from error
    if json:
        render.piece(report.to_json())
    elif prometheus:
        render.piece(textfile(report))
    else:
        render.piece(report.text())
    return report.exit_code(strict=strict)


@group.command("list")
def catalogue(json: options.Json = False) -> None:
    """Every check: area, id, severity and threshold."""
    from preflight.catalogue import catalogue as rows

    if json:
        names = ("area", "id", "severity", "threshold")
        render.as_json([dict(zip(names, row, strict=True)) for row in rows()])
        return
    width = max(len(row[1]) for row in rows())
    for area, check, severity, threshold in rows():
        render.data(f"{area:<9} {check:<{width}} {severity:<5} {threshold}")


def _needs(host: Host, plan: Path | None, model: Path | None, gpus: int) -> Needs:
    """From the plan given, else from one made for the model, else from the profile."""
    from appliance.errors import UsageError
    from appliance.plan.model import load_plan
    from preflight import plan_needs, profile

    if plan is not None and model is not None:
        raise UsageError("both --plan and --model: the needs come from one of them")
    if plan is not None:
        return plan_needs(load_plan(plan).model_dump(mode="json"))
    if model is None:
        return profile(gpus=gpus, device="cuda" if gpus else "cpu")

    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.plan.planner import plan as make_plan
    from appliance.plan.request import Policy

    made = make_plan(host, read_checkpoint(model.absolute()), None, Policy())
    return plan_needs(made.model_dump(mode="json"))
