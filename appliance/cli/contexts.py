"""bench context, bench record: long prompts, and sessions of real people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance import render
from appliance.cli.loads import KeyFile, Load, Model, NoIgnoreEos, Out, Seed, Url
from appliance.errors import UsageError

SHORTEST = 4096  # tokens


def register(group: typer.Typer) -> None:
    group.command()(context)
    group.command()(record)


def context(
    least: Annotated[
        int | None,
        typer.Option(
            "--from", min=64, help="Shortest prompt, tokens (default 4096, or --to if less)."
        ),
    ] = None,
    most: Annotated[
        int | None, typer.Option("--to", min=64, help="Longest (default: what the server holds).")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 3,
    beside: Annotated[
        int, typer.Option(help="Tokens a fourth stream reads beside three.")
    ] = 131072,
    out: Out = Path("context"),
    url: Url = None,
    model: Model = None,
    key_file: KeyFile = None,
    seed: Seed = 1,
    stop_at_end: NoIgnoreEos = False,
) -> int:
    """Speed against context, first reads, cached prefixes. Exit code 3 without prefix caching."""
    from appliance.bench.capacity import Goal
    from appliance.bench.context import lengths_to, measure_context
    from appliance.bench.context_report import prefix_check, require_lengths
    from appliance.bench.context_text import context_lines
    from appliance.bench.record import Record
    from appliance.cli.measured import find

    found = find(url, model, key_file, ignore_eos=not stop_at_end)
    held = found.context_tokens()
    longest = most or held
    if longest is None:
        raise UsageError("the server does not say how long a context it holds", fix="--to TOKENS")
    if held is not None and longest > held:
        raise UsageError(
            f"--to {longest:,}: the server holds {held:,} tokens",
            fix=f"--to {held} or less, or `appliance up --context {longest}`",
        )
    if least is not None and least > longest:
        raise UsageError(f"--from {least:,} is above --to {longest:,}", fix=f"--to {least} or more")
    first = min(SHORTEST, longest) if least is None else least
    lengths = lengths_to(first, longest, repeats=repeats, beside=beside)
    load = Load(seed, None, None, think=False)
    record = Record.create(out, load.stamp("context", Goal(), found, lengths))
    measure_context(record, load.target(found))
    render.lines(context_lines(record))
    require_lengths(record)
    check = prefix_check(record)
    return 3 if check is not None and check.works is False else 0


def record(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Lines are added to this file.", metavar="FILE")
    ] = Path("recorded.jsonl"),
    port: Annotated[
        int, typer.Option(help="Point your tool at this port; 0: any.", min=0, max=65535)
    ] = 8460,
    to: Annotated[
        str | None, typer.Option(help="The server (default: the appliance here).", metavar="URL")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Keep what was said, too.")] = False,
) -> None:
    """Pass a real session on and keep its lengths and timings, for --trace. Ctrl-C ends it."""
    import asyncio

    from appliance.bench.proxy import Proxy
    from appliance.bench.recorder import Recorder
    from appliance.cli.measured import find

    upstream = to if to is not None else find(None, None, None, ignore_eos=False).endpoint.url
    recorder = Recorder(out, text)
    proxy = Proxy(upstream.rstrip("/").removesuffix("/v1"), recorder, render.say)

    def ready(chosen: int) -> None:
        what = "lengths, timings AND TEXT" if text else "lengths and timings, no text"
        render.say(f"point your tool at http://127.0.0.1:{chosen}/v1; {what} go to {out}")

    try:
        asyncio.run(proxy.serve(port, ready))
    finally:
        render.say(f"{render.counted(recorder.lines, 'request')} kept")
        if recorder.without_usage:
            render.say(
                f"{recorder.without_usage} of them without token counts, which --trace refuses: "
                "have your tool set stream_options.include_usage"
            )
