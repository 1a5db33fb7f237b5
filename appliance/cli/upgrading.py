"""upgrade: to another model, plan, image or release, and back by itself where that fails."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.cli.at import COMPOSE, ChartAt, ComposeAt, runner_at
from appliance.errors import UsageError
from appliance.settings import read_settings

if TYPE_CHECKING:
    from appliance.upgrade.book import Deployment, Upgrade
    from appliance.upgrade.run import Runner

group = typer.Typer(
    help="To another model, plan or release, and back by itself where that fails.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Model = Annotated[Path | None, typer.Option(help="The checkpoint to serve from now on.")]
Plan = Annotated[Path | None, typer.Option(help="Its plan; else one is made.")]
Image = Annotated[
    str | None, typer.Option(help="The image to run from now on, best as name@sha256:...")
]


@group.command("run")
def run(
    release: Annotated[str, typer.Option(help="What to call this deployment.")],
    model: Model = None,
    plan: Plan = None,
    image: Image = None,
    at: options.At = None,
    chart: ChartAt = None,
    compose_file: ComposeAt = COMPOSE,
    signature: Annotated[
        Path | None,
        typer.Option(help="minisign's signature of the image's digest.", metavar="FILE"),
    ] = None,
    prove: Annotated[
        list[str] | None,
        typer.Option(
            help="Also measure before and after: speed:STREAMS:TURNS[:SHAPE] (p5 within 5 %), "
            "accuracy:ITEMS:FILE (answers not worse). May be given twice.",
            metavar="WHAT",
        ),
    ] = None,
) -> int:
    """Pull, verify, check, plan, drain, switch, prove, commit. Exit code 3 where it went back."""
    from appliance.cli.proofs import proof_of

    runner = runner_at(at, chart, compose_file)
    if prove and at is not None:
        raise UsageError("--prove measures this host's own appliance", fix="leave out --at")
    for one in prove or ():
        proof_of(one, runner.folder)  # refused now, not after the old deployment was measured
    current = _adopted(runner)
    wanted = _wanted(runner, current, release, model, plan, image)
    if signature is not None:
        wanted = wanted.model_copy(update={"image_signature": signature.read_text()})
    with steadily():
        return _told(runner.upgrade(wanted, prove or ()))


@group.command("plan")
def plan_(
    model: Model = None,
    release: Annotated[str, typer.Option(help="What to call this deployment.")] = "next",
    plan: Plan = None,
    image: Image = None,
    at: options.At = None,
    chart: ChartAt = None,
    compose_file: ComposeAt = COMPOSE,
) -> None:
    """What an upgrade would change, and for how long nothing would be served. Changes nothing."""
    from appliance.upgrade.book import changes, read_book
    from appliance.upgrade.here import Here

    runner, settings = runner_at(at, chart, compose_file), read_settings()
    current = read_book(runner.path).current or runner.world.served()
    wanted = _wanted(runner, current, release, model, plan, image)
    runner.world.pull(wanted)
    runner.world.verify(wanted)
    target = runner.world.plan(wanted)
    render.table(list(changes(current, target).items()))
    if isinstance(runner.world, Here):
        _downtime_here(target, settings.drain_seconds)
    else:
        most = render.duration(settings.drain_seconds)
        render.table([("not serving", f"for one load, after {most} of draining at most")])


def _downtime_here(target: Deployment, drain_seconds: float) -> None:
    from appliance.cli.serving import files_of, wishes_of
    from appliance.plan.model import load_plan
    from appliance.serve.spec import spec

    settings = read_settings()
    assert target.plan is not None
    made = load_plan(target.plan)
    started = spec(made, target.model, target.plan, wishes_of(settings), files_of(settings))
    for home in ("device", "host"):
        held = max(rank.total_bytes(home) for rank in made.ranks)
        render.table([(f"largest rank, {home}", render.size(held))])
    longest = drain_seconds + started.load_seconds
    render.table([
        ("not serving", f"about {render.duration(started.load_seconds)} while it loads, after"
         f" {render.duration(drain_seconds)} of draining at most"
         f" ({render.duration(longest)} in all)"),
    ])  # fmt: skip


@group.command()
def resume(at: options.At = None, chart: ChartAt = None, compose_file: ComposeAt = COMPOSE) -> int:
    """Finish an upgrade that was cut off by a crash or a power cut."""
    with steadily():
        outcome = runner_at(at, chart, compose_file).resume()
    if outcome is None:
        render.say("no upgrade was cut off")
        return 0
    return _told(outcome)


@group.command()
def rollback(
    at: options.At = None, chart: ChartAt = None, compose_file: ComposeAt = COMPOSE
) -> int:
    """Back to what was served before the current deployment."""
    with steadily():
        return _told(runner_at(at, chart, compose_file).rollback())


@group.command()
def history(at: options.At = None, json: options.Json = False) -> None:
    """What was deployed when, and how each upgrade ended."""
    from appliance.upgrade.book import read_book

    book = read_book(runner_at(at, None, COMPOSE).path)
    if json:
        render.as_json(book.model_dump(mode="json"))
        return
    for one in book.past:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.started))
        why = f": {one.reason}" if one.reason else ""
        render.data(f"{when}  {one.previous.release} -> {one.target.release}  {one.outcome}{why}")
    if book.running is not None:
        cut = f"{book.running.previous.release} -> {book.running.target.release}"
        render.say(f"cut off at {book.running.step}: {cut}; appliance upgrade resume finishes it")
    if book.current is not None:
        render.say(f"serving: {book.current.release} ({book.current.model})")
    else:
        render.say("nothing was upgraded here yet")


@group.command()
def schema() -> None:
    """Which version of the state directory's files this release reads and writes."""
    from appliance.upgrade.migrate import SCHEMA_VERSION

    render.data(f"schema {SCHEMA_VERSION}")


@group.command()
def migrate(version: Annotated[int, typer.Argument(help="The version to go to.")]) -> None:
    """The state directory's files to another version; nothing may serve from it meanwhile."""
    from appliance.upgrade import migrate as table

    table.migrate(read_settings().state_dir, version)
    render.say(f"schema version {version}")


@contextmanager
def steadily() -> Iterator[None]:
    """Once it is begun: a terminal that goes away changes nothing, and SIGTERM is a Ctrl-C, which
    is undone like any failure. A second one cuts the undoing off."""
    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.default_int_handler),
    }
    try:
        yield
    except KeyboardInterrupt:
        render.say("cut off: appliance upgrade resume finishes it")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wanted(
    runner: Runner, current: Deployment, release: str, model: Path | None, plan: Path | None,
    image: str | None,
) -> Deployment:  # fmt: skip
    from appliance.upgrade.away import Away
    from appliance.upgrade.book import Deployment

    world = runner.world
    if isinstance(world, Away):
        if image is None and model is None:
            raise UsageError("to what? Give --image, --model or both")
        if plan is not None:
            raise UsageError("a container plans for itself", fix="set APPLIANCE_PLAN there")
        # What the chart and .env take as it stands: refused there, the old one would have stopped.
        record = f"{re.sub('[^A-Za-z0-9.-]', '-', release)}-{int(time.time()):x}"
        return world.place.target(current, release, image, model, record)
    if model is None:
        raise UsageError("which checkpoint? Give --model", fix="--at for a container")
    if image is not None:
        raise UsageError("there is no image on this host's own appliance", fix="--at compose")
    return Deployment(release=release, model=model.absolute(), plan=plan and plan.absolute())


def _adopted(runner: Runner) -> Deployment:
    """The first upgrade records what was started before there was a record."""
    from appliance.upgrade.book import read_book

    current = read_book(runner.path).current
    if current is None:
        current = runner.world.served()
        runner.adopt(current)
    return current


def _told(outcome: Upgrade) -> int:
    if outcome.outcome == "committed":
        render.say(f"serving {outcome.target.release}")
        return 0
    render.say(f"still serving {outcome.previous.release}: {outcome.reason}")
    return 3
