"""tune: the host changes that preflight advises, shown, made, and undone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.errors import ApplianceError, UsageError
from appliance.settings import Settings, read_settings

if TYPE_CHECKING:
    from preflight import Host, Needs
    from preflight.tune import Step

RECORD = "tune.json"
HUGE_PAGE_BYTES = 2 << 20  # the size that the engine asks for


def register(app: typer.Typer) -> None:
    app.command()(tune)


def tune(
    apply: Annotated[bool, typer.Option("--apply", help="Make the changes (root).")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Put back what was changed (root).")] = False,
    for_good: Annotated[
        bool, typer.Option("--for-good", help="With --apply: at each boot, too.")
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(help="For what this plan needs (default: what `up` serves).", metavar="FILE"),
    ] = None,
    huge_pages: Annotated[
        bool, typer.Option("--huge-pages", help="Reserve 2 MiB pages for the plan's host experts.")
    ] = False,
    host: options.Recorded = None,
    root: options.Root = None,
    json: options.Json = False,
) -> int:
    """Show what to change on this host for the model to load and run well.

    --apply changes it for this boot and records what was there before; --undo puts that back.
    """
    from appliance.cli.judging import Seen
    from preflight.tune import advise

    settings = read_settings()
    record = settings.state_dir / RECORD
    if apply and undo:
        raise UsageError("--apply and --undo: give one of them")
    if json and (apply or undo):
        raise UsageError("--json shows what would change: it goes with neither --apply nor --undo")
    if for_good and not apply:
        raise UsageError("--for-good goes with --apply")
    if host is not None and (apply or undo):
        raise UsageError("--host is a recording: nothing can be changed there")
    where = root or settings.host_root
    if undo:
        return _undo(record, where)
    seen = Seen.of(options.source(host, root or (None if host else where)), None, None)
    needs = _needs(seen.host, plan, settings, huge_pages=huge_pages, here=host is None)
    advice = advise(seen.host, needs)
    if json:
        render.as_json({"steps": [step.model_dump() for step in advice.steps],
                        "notes": list(advice.notes)})  # fmt: skip
        return 0
    _show(advice.steps, "would become" if not apply else "becomes")
    render.lines(f"note: {note}" for note in advice.notes)
    if not (advice.steps or advice.notes):
        render.data("nothing to change")
    elif apply:
        _apply(record, where, seen.host, needs, for_good=for_good)
    elif host is None:
        render.say("nothing was changed; the same with --apply makes these changes (as root)")
    return 0


def _needs(
    host: Host, plan: Path | None, settings: Settings, *, huge_pages: bool, here: bool
) -> Needs:
    """Of the plan named, else (of this machine) of what `up` serves, else of the profile."""
    from appliance.cli.judging import needs_of, wanted
    from appliance.cli.serving import files_of
    from appliance.plan.model import load_plan

    path = plan or files_of(settings).plan
    if plan is not None or (here and path.is_file()):
        render.say(f"for the plan {path}")
        return needs_of(load_plan(path), settings, HUGE_PAGE_BYTES if huge_pages else None)
    if huge_pages:
        raise UsageError(
            "how many huge pages depends on the plan, and there is none yet",
            fix="appliance preflight --plan --model DIR, or --plan FILE",
        )
    render.say("for any model: no plan is given")
    return wanted(host, None, None, 0 if host.gpus == () else None, settings).needs


def _show(steps: tuple[Step, ...], becomes: str) -> None:
    for step in steps:
        before = "unknown" if step.before is None else step.before
        render.data(f"{step.path}: {before} {becomes} {step.after}")
        render.data(f"    {step.why}")


def _apply(record: Path, root: Path, host: Host, needs: Needs, *, for_good: bool) -> None:
    from preflight.tune import TuneError, advise, apply

    record.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = apply(advise(host, needs), record, root=root, for_good=for_good)
    except TuneError as error:
        fix = "appliance tune --undo puts back what was changed before" if record.exists() else None
        raise ApplianceError(str(error), fix=fix) from error
    for path in done.files:
        render.say(f"wrote {path}")
    render.say(f"recorded in {record}; appliance tune --undo puts it back")


def _undo(record: Path, root: Path) -> int:
    from preflight.tune import TuneError, undo

    if not record.exists():
        raise UsageError(f"nothing to undo: there is no {record}")
    try:
        done = undo(record, root=root)
    except TuneError as error:
        raise ApplianceError(str(error)) from error
    for step in reversed(done.steps):
        render.data(f"{step.path}: {step.after} is {step.before} again")
    for path in done.files:
        render.data(f"{path} is as it was" if path in done.replaced else f"removed {path}")
    return 0
