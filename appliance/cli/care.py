"""support-bundle, upgrade: what is done to an appliance over the years."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.cli.serving import files_of, supervisor_argv, wishes_of
from appliance.settings import inherited_environment, read_settings

if TYPE_CHECKING:
    from appliance.upgrade.book import Upgrade
    from appliance.upgrade.run import Runner

group = typer.Typer(
    help="To another model, plan or release, and back by itself where that fails.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def register(app: typer.Typer) -> None:
    app.command("support-bundle")(support_bundle)
    app.add_typer(group, name="upgrade")


def support_bundle(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where to write.")] = None,
    only_list: Annotated[
        bool, typer.Option("--list", help="Say what would be in it; write nothing.")
    ] = False,
) -> None:
    """Facts, findings, plan, settings, logs and metrics in one file, secrets taken out.

    Listed before it is written. Replay it: appliance preflight --host BUNDLE/machine.
    """
    from appliance import metrics, support
    from appliance.cli.view import serving_facts
    from appliance.serve import local
    from preflight import check

    settings = read_settings()
    files = files_of(settings)
    out = out or Path(f"appliance-support-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder) / "machine"
        with render.Progress("looking at the machine and the appliance"):
            host = options.machine(None, machine)
            found = local.status(files)
        report = check(host)
        facts = metrics.Facts(
            host=host,
            report=report,
            serving=serving_facts(None if found is None else found.state),
            engine=None if found is None else found.engine,
        )
        texts = {
            "findings.txt": report.text(),
            "findings.json": report.to_json(),
            "metrics.txt": metrics.page(facts),
            "settings.json": settings.model_dump_json(indent=1) + "\n",
        }
        items = support.collect(files, texts, machine)
    for item in items:
        taken = f", {item.redacted} secrets taken out" if item.redacted else ""
        render.say(f"  {item.name}: {render.size(len(item.text.encode()))}{taken}")
    if only_list:
        return
    size_bytes = support.write(items, out)
    render.say(f"{render.size(size_bytes)}; read it before you send it")
    render.data(str(out))


@group.command("run")
def run(
    model: Annotated[Path, typer.Option(help="The checkpoint to serve from now on.")],
    release: Annotated[str, typer.Option(help="What to call this deployment.")],
    plan: Annotated[Path | None, typer.Option(help="Its plan; else one is made.")] = None,
) -> int:
    """Pull, verify, check, plan, drain, switch, prove, commit. Exit code 3 where it went back."""
    from appliance.upgrade.book import Deployment

    runner = _runner()
    _adopt(runner)
    target = Deployment(release=release, model=model.absolute(), plan=plan and plan.absolute())
    return _told(runner.upgrade(target))


@group.command("plan")
def plan_(
    model: Annotated[Path, typer.Option(help="The checkpoint to serve from now on.")],
    release: Annotated[str, typer.Option(help="What to call this deployment.")] = "next",
    plan: Annotated[Path | None, typer.Option(help="Its plan; else one is made.")] = None,
) -> None:
    """What an upgrade would change, and for how long nothing would be served. Changes nothing."""
    from appliance.plan.model import load_plan
    from appliance.serve.spec import spec
    from appliance.upgrade.book import Deployment, changes, read_book
    from appliance.upgrade.here import Here

    runner, settings = _runner(), read_settings()
    here = runner.world
    assert isinstance(here, Here)
    current = read_book(runner.path).current or here.served()
    wanted = Deployment(release=release, model=model.absolute(), plan=plan and plan.absolute())
    here.pull(wanted)
    here.verify(wanted)
    target = here.plan(wanted)
    assert target.plan is not None
    made = load_plan(target.plan)
    started = spec(made, target.model, target.plan, wishes_of(settings), files_of(settings))
    render.table(list(changes(current, target).items()))
    for home in ("device", "host"):
        held = max(rank.total_bytes(home) for rank in made.ranks)
        render.table([(f"largest rank, {home}", render.size(held))])
    longest = settings.drain_seconds + started.load_seconds
    render.table([
        ("not serving", f"about {render.duration(started.load_seconds)} while it loads, after"
         f" {render.duration(settings.drain_seconds)} of draining at most"
         f" ({render.duration(longest)} in all)"),
    ])  # fmt: skip


@group.command()
def resume() -> int:
    """Finish an upgrade that was cut off by a crash or a power cut."""
    outcome = _runner().resume()
    if outcome is None:
        render.say("no upgrade was cut off")
        return 0
    return _told(outcome)


@group.command()
def rollback() -> int:
    """Back to what was served before the current deployment."""
    return _told(_runner().rollback())


@group.command()
def history(json: options.Json = False) -> None:
    """What was deployed when, and how each upgrade ended."""
    from appliance.upgrade.book import read_book

    book = read_book(_runner().path)
    if json:
        render.as_json(book.model_dump(mode="json"))
        return
    for one in book.past:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.started))
        why = f": {one.reason}" if one.reason else ""
        render.data(f"{when}  {one.previous.release} -> {one.target.release}  {one.outcome}{why}")
    if book.current is not None:
        render.say(f"serving: {book.current.release} ({book.current.model})")


def _runner() -> Runner:
    from appliance.upgrade.here import Here
    from appliance.upgrade.run import Runner

    settings = read_settings()
    files = files_of(settings)
    ignore = tuple(name for name in settings.ignore_checks.split(",") if name)
    here = Here(
        files,
        wishes_of(settings),
        lambda spec: supervisor_argv(spec, ignore),
        inherited_environment(),
        settings.drain_seconds,
        ignore,
    )
    return Runner(here, files.folder, tell=lambda words: render.say(f"upgrade: {words}"))


def _adopt(runner: Runner) -> None:
    """The first upgrade records what `appliance up` started."""
    from appliance.upgrade.book import read_book
    from appliance.upgrade.here import Here

    assert isinstance(runner.world, Here)
    if read_book(runner.path).current is None:
        runner.adopt(runner.world.served())


def _told(outcome: Upgrade) -> int:
    if outcome.outcome == "committed":
        render.say(f"serving {outcome.target.release}")
        return 0
    render.say(f"still serving {outcome.previous.release}: {outcome.reason}")
    return 3
