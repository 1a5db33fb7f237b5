"""size: would a model fit a machine that nobody has yet, how fast, and what would a change buy."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.cli.models import checkpoint_of, write_listing
from appliance.errors import UsageError

HANGING = 14


def register(app: typer.Typer) -> None:
    app.command()(size)


def _show_hardware(asked: bool) -> None:
    from appliance.plan.hardware import hardware_lines

    if asked:
        render.lines(hardware_lines())
        raise typer.Exit


def size(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder, manifest or listing of a checkpoint, or a known model's name."
        ),
    ],
    gpu: Annotated[list[str], typer.Option(help="Card: rtx-pro-6000, h200, ...", metavar="NAME")],
    count: Annotated[list[int], typer.Option(help="Cards.", metavar="N")],
    host_ram: Annotated[list[str], typer.Option(help="Host memory: 256GiB.", metavar="SIZE")],
    users: Annotated[
        list[int] | None, typer.Option(help="Requests at once (default 6).", metavar="N")
    ] = None,
    context: Annotated[
        list[str] | None,
        typer.Option(help="Longest conversation: 256K (default: the model's).", metavar="TOKENS"),
    ] = None,
    box: Annotated[
        str, typer.Option("--host", help="Kind of host: workstation, epyc-1p, ...", metavar="NAME")
    ] = "epyc-1p",
    expert_parallel: options.ExpertParallel = False,
    target: Annotated[
        float | None, typer.Option(help="Tokens a second each user wants (default 40).")
    ] = None,
    kv_dtype: options.KvDtype = None,
    heat: options.HeatFiles = None,
    listing: Annotated[
        Path | None,
        typer.Option(
            help="Write what the headers say to FILE, which MODEL may be.", metavar="FILE"
        ),
    ] = None,
    hardware: Annotated[
        bool,
        typer.Option(
            "--hardware",
            help="Show the cards and hosts there are, with their sources.",
            is_eager=True,
            callback=_show_hardware,
        ),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Options side by side: repeat --gpu, --count, --users, ..."),
    ] = False,
) -> None:
    """Does it fit, what binds first, how fast, and which change would help. No machine is needed.

    Example: size glm-5.3-flash --gpu rtx-pro-6000 --count 2 --host-ram 256GiB --users 4
    --context 64K
    """
    from appliance.plan.sizing import TARGET_TOKENS_PER_SECOND, Ask, bytes_from, tokens_from
    from appliance.plan.sizing_report import compare_lines, size_lines

    contexts = [tokens_from(text) for text in context] if context else [None]
    asks = [
        Ask(gpu=card, count=cards, host_bytes=bytes_from(memory), users=people,
            context_tokens=tokens, host=box, expert_parallel=expert_parallel,
            target=TARGET_TOKENS_PER_SECOND if target is None else target,
            kv_dtype=kv_dtype or "auto")
        for card, cards, memory, people, tokens
        in product(gpu, count, host_ram, users or [6], contexts)
    ]  # fmt: skip
    if len(asks) > 1 and not compare:
        raise UsageError(f"{len(asks)} machines are described", fix="--compare puts them in rows")
    if len(asks) == 1 and compare:
        raise UsageError(
            "one machine has nothing beside it",
            fix="give an option twice: --count 2 --count 4",
        )
    counts = options.heat(heat)
    with render.Progress(f"reading the headers of {model}"):
        checkpoint = checkpoint_of(model)
    if listing is not None:
        write_listing(checkpoint, listing)
    with render.Progress("planning"):
        lines = (
            compare_lines(checkpoint, asks, counts)
            if compare
            else size_lines(checkpoint, asks[0], counts)
        )
    # Rows of a table stay whole; sentences hang below their first word.
    render.lines(lines if compare else render.wrapped(lines, HANGING))
