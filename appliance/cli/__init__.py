"""`appliance`: parse, one call, render. Errors are caught here, once.

Nothing heavy is imported before a command runs: every command imports what it calls.
Exit codes: 0 fine, 1 failed, 2 wrong usage, 3 a check failed, 4 only warnings, 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from appliance import render
from appliance.cli import (
    accuracy,
    bench,
    bundles,
    care,
    chart,
    container,
    contexts,
    demo,
    loads,
    machine,
    planning,
    running,
    seating,
    serving,
    sizing,
    store,
    transfers,
    tuning,
    upgrading,
    weights,
)
from appliance.errors import ApplianceError

app = typer.Typer(
    help="Serve a very large mixture-of-experts model on a machine whose GPUs cannot hold it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog="--debug anywhere shows the traceback of an error.",
)


def say_version(asked: bool) -> None:
    if asked:
        render.data(f"appliance {loads.release() or 'of a checkout that is not installed'}")
        raise typer.Exit


@app.callback()
def every(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Say which release this is.", callback=say_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Takes what goes before a command; `version` has been dealt with by then."""


serving.register(app)
running.register(app)
demo.register(app)
container.register(app)
care.register(app)
app.add_typer(upgrading.group, name="upgrade")
tuning.register(app)
sizing.register(app)
app.add_typer(machine.group, name="preflight")
contexts.register(bench.group)
app.add_typer(bench.group, name="bench")
app.add_typer(seating.group, name="capacity")
app.add_typer(accuracy.group, name="accuracy")
planning.group.command("values")(chart.values)
app.add_typer(planning.group, name="plan")
transfers.register(weights.group)
store.register(weights.group)
weights.group.add_typer(bundles.group, name="bundle")
app.add_typer(weights.group, name="weights")

_ROOM = "free space there, or name a place on another disk"
WAYS_OUT = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: "name a place that can be written",
    errno.EACCES: "name another place, or let this user at it",
    errno.ENOENT: "make that folder first, or correct the name",
    errno.EISDIR: "name a file in that folder",
    errno.ENOTDIR: "name a folder: one on the way to it is a file",
}


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command line; whatever went wrong has been said."""
    debug = "--debug" in arguments
    words = [word for word in arguments if word != "--debug"]
    try:
        return app(words, prog_name="appliance", standalone_mode=False) or 0
    except KeyboardInterrupt:
        render.say("interrupted")
        return 130
    except TyperException as problem:
        render.say(f"error: {problem.format_message()}")
        render.say("  fix: appliance --help, or --help after the command")
        return 2
    except ApplianceError as problem:
        if debug:
            raise
        render.error(problem)
        return problem.exit_code
    except OSError as problem:
        if debug:
            raise
        # Said once for every file there is: a full disk, a missing folder, no permission.
        where = f"{problem.filename}: " if problem.filename else ""
        told = f"{where}{problem.strerror or problem}"
        render.error(ApplianceError(told, fix=WAYS_OUT.get(problem.errno or 0)))
        return 1
    except Exception as problem:
        if debug:
            raise
        render.say(f"error: {type(problem).__name__}: {problem}")
        render.say("  this is a fault of the appliance: rerun with --debug for where it happened")
        return 1


def main() -> None:
    sys.exit(run(sys.argv[1:]))
