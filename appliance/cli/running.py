"""status, logs, down: of what runs on this host, or with --at elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.cli.serving import files_of
from appliance.cli.watch import watched
from appliance.settings import read_settings


def register(app: typer.Typer) -> None:
    app.command()(status)
    app.command()(logs)
    app.command()(down)


def status(json: options.Json = False, at: options.At = None) -> int:
    """What runs, since when, where every expert lives, what crossed from host memory."""
    if at is not None:
        from appliance.cli.at import COMPOSE, status_at

        return status_at(at, COMPOSE, json=json)
    from appliance.cli.view import now_of, status_rows
    from appliance.serve import local

    settings = read_settings()
    found = local.status(files_of(settings))
    if found is None:
        if json:
            render.as_json(None)
        render.say("nothing was ever started from this state directory")
        return 3
    now = now_of(found, settings)
    if json:
        render.as_json({**found.as_json(), **now})
    else:
        render.table(status_rows(found, now))
    return 0 if found.is_serving else 3


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="New lines as they come.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many, from the end.")] = 50,
    at: options.At = None,
) -> None:
    """The engine's log; with --at the container's."""
    if at is not None:
        from appliance.cli.at import COMPOSE, logs_at

        logs_at(at, COMPOSE, lines)
        return
    from appliance.serve import local

    path = files_of(read_settings()).engine_log
    for line in local.log_lines(path, lines, follow=lambda: follow):
        render.data(line)


def down(at: options.At = None) -> int:
    """Refuse new requests, let accepted ones finish, stop the engine."""
    if at is not None:
        from appliance.cli.at import COMPOSE, down_at

        return down_at(at, COMPOSE)
    from appliance.serve import local

    settings = read_settings()
    with watched() as observe:
        last = local.stop(files_of(settings), observe, limit_seconds=settings.drain_seconds + 60.0)
    render.say("nothing was running" if last is None else last.message or "stopped")
    return 0
