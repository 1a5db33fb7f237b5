"""preflight: is this machine good enough, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from appliance import durable, render
from appliance.cli import options
from appliance.errors import UsageError
from appliance.settings import Settings, read_settings

if TYPE_CHECKING:
    from appliance.cli.judging import Wanted
    from preflight import Report

BARE = Path("-")


class Group(TyperGroup):
    """`--plan` with no file after it means the plan of the state directory."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        after = [*args[1:], "--"]
        bare = {
            at for at, word in enumerate(args) if word == "--plan"
            and (after[at].startswith("-") or after[at] in self.commands)
        }  # fmt: skip
        words = [f"--plan={BARE}" if at in bare else word for at, word in enumerate(args)]
        return super().parse_args(ctx, words)


group = typer.Typer(
    cls=Group,
    help="Look at this machine: will it serve well, and what to change.",
    rich_markup_mode=None,
)


Model = Annotated[
    Path | None, typer.Option(help="Plan this model, judge by that plan.", metavar="DIR")
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        help="With a model (--model or APPLIANCE_MODEL): write its plan, if nothing fails, to FILE "
        "or to where `up` looks. Without: judge by the plan in FILE.",
        metavar="[FILE]",
    ),
]
Gpus = Annotated[
    int | None, typer.Option(min=0, help="Cards to use; 0: none (default: 1, or the plan's).")
]
Measure = Annotated[
    bool, typer.Option("--measure", help="Measure links, pins and disk, too (under 60 s).")
]
Record = Annotated[
    Path | None, typer.Option(help="Also keep what was seen, serials blanked.", metavar="DIR")
]
Prometheus = Annotated[
    bool, typer.Option("--prometheus", help="A textfile for node_exporter on stdout.")
]


@group.callback(invoke_without_command=True)
def preflight(
    context: typer.Context,
    model: Model = None,
    plan: PlanFile = None,
    gpus: Gpus = None,
    measure: Measure = False,
    ignore: options.Ignore = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail, too.")] = False,
    host: options.Recorded = None,
    root: options.Root = None,
    record: Record = None,
    json: options.Json = False,
    prometheus: Prometheus = False,
) -> int:
    """Exit code 0: ready; 3: a check failed; 4: only warnings (3 with --strict)."""
    from appliance.cli import judging
    from appliance.cli.serving import files_of
    from appliance.serve.measured import keep_rates

    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return 0
    if json and prometheus:
        raise UsageError("--json and --prometheus both want stdout: give one of them")
    if measure and host is not None:
        raise UsageError("--measure measures this machine, and --host is a recording")
    if gpus is not None and model is None and plan not in (None, BARE):
        raise UsageError(f"--plan {plan} says how many cards it takes, and --gpus {gpus} is given",
                         fix="leave out --gpus, or plan anew with --model DIR")  # fmt: skip
    settings = read_settings()
    if plan == BARE:
        plan, model = _where_up_looks(settings, model, host)
    source = options.source(host, root or (None if host else settings.host_root))
    model_folder = model or settings.model
    seen = judging.Seen.of(
        source, record, None if host else judging.folders(settings, model_folder)
    )
    kept = None if host else files_of(settings)
    what = judging.wanted(seen.host, model, plan, gpus, settings, kept)
    if measure:
        seen.measure(what, model_folder, settings)
        keep_rates(files_of(settings), seen.real)
        what = judging.wanted(seen.host, model, plan, gpus, settings)
    seen.save()
    ignored = {*(ignore or ()), *(name for name in settings.ignore_checks.split(",") if name)}
    report = judging.judged(seen.host, what, ignored)
    _show(report, json=json, prometheus=prometheus)
    if model is not None and plan is not None:
        if record is not None:
            what = judging.wanted(seen.real, model, plan, gpus, settings, kept)
        _write(what, plan, report)
    return report.exit_code(strict=strict)


def _show(report: Report, *, json: bool, prometheus: bool) -> None:
    from preflight.report import prometheus as textfile

    if json:
        render.piece(report.to_json())
    else:
        render.piece(textfile(report) if prometheus else report.text())


def _where_up_looks(settings: Settings, model: Path | None, host: Path | None) -> tuple[Path, Path]:
    """The state directory's plan, and the model asked for, set, or served last."""
    from appliance.cli.serving import files_of
    from appliance.serve.state import make_folder, read_state

    if host is not None:
        raise UsageError(
            "--host is another machine: `up` would serve its plan here",
            fix="name a file: --plan FILE",
        )
    files = files_of(settings)
    last = read_state(files)
    model = model or settings.model or (last.model if last else None)
    if model is None:
        raise UsageError(
            "--plan plans a model, and none is given, set or served yet",
            fix="--model DIR, or APPLIANCE_MODEL; --plan FILE judges by a plan there is",
        )
    make_folder(files)
    return files.plan, model


def _write(what: Wanted, path: Path, report: Report) -> None:
    """The plan, pinning included; not where a check failed."""
    from appliance.cli.judging import pinning_lines

    if what.plan is None or report.failures:
        render.say(f"no plan was written to {path}: a check failed")
        return
    what.plan.write(path)
    for line in pinning_lines(what.plan):
        render.say(line)
    render.say(f"plan written to {path}")


def _refuse_options(context: typer.Context) -> None:
    """An option before a subcommand would be dropped without a word."""
    for name in context.params:
        found = context.get_parameter_source(name)
        if found is not None and found.name != "DEFAULT":
            sub = context.invoked_subcommand
            raise UsageError(
                f"--{name} belongs to preflight itself, not to `preflight {sub}`",
                fix=f"appliance preflight {sub} --help",
            )


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
        render.data(f"{area:<8} {check:<{width}} {severity:<4} {threshold}")


@group.command()
def picture(
    file: Annotated[Path, typer.Argument(metavar="FILE.svg", help="Where to draw.")],
    host: options.Recorded = None,
    root: options.Root = None,
) -> None:
    """Draw sockets, memory nodes, GPUs and links; measured rates where a recording has them."""
    from appliance.cli import judging
    from preflight.picture import picture as drawn

    settings = read_settings()
    source = options.source(host, root or (None if host else settings.host_root))
    seen = judging.Seen.of(source, None, None if host else judging.folders(settings, None))
    with durable.naming(file):
        file.write_text(drawn(seen.host), encoding="utf-8")
    render.data(str(file))
