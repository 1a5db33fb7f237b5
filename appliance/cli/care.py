"""support-bundle, drain, admit: what is done to an appliance over the years."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.cli.serving import files_of
from appliance.errors import ServeError
from appliance.settings import read_settings


def register(app: typer.Typer) -> None:
    app.command("support-bundle")(support_bundle)
    app.command()(drain)
    app.command()(admit)


def support_bundle(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file (default: appliance-support-TIME.tar.gz here)."),
    ] = None,
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
            found, unknown = None, None
            try:
                found = local.status(files)
            except ServeError as error:  # what is broken is what the bundle is for
                unknown = str(error)
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
        if unknown is not None:
            texts["status.txt"] = unknown + "\n"
        items = support.collect(files, texts, machine)
    for item in items:
        taken = f", {item.redacted} secrets taken out" if item.redacted else ""
        render.say(f"  {item.name}: {render.size(len(item.text.encode()))}{taken}")
    if only_list:
        return
    size_bytes = support.write(items, out)
    render.say(f"{render.size(size_bytes)}; read it before you send it")
    render.data(str(out))


def drain() -> int:
    """Take no new requests and wait for the accepted ones; `appliance admit` takes them again."""
    from appliance.serve.drain import drain as take_none

    settings = read_settings()
    if not take_none(files_of(settings), settings.drain_seconds):
        render.say("nothing is served")
        return 3
    render.say("every accepted request has finished; new ones get 503 with Retry-After")
    return 0


def admit() -> int:
    """Take requests again after `appliance drain`."""
    from appliance.serve.drain import admit as take

    if not take(files_of(read_settings())):
        render.say("nothing is served")
        return 3
    render.say("it takes requests again")
    return 0
