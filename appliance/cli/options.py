"""Options that several commands take, and what they become."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from appliance.plan.request import Policy
    from appliance.plan.routing import Heat
    from preflight import Host

Model = Annotated[Path | None, typer.Option(help="Folder of an EXL3 checkpoint.", metavar="DIR")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
TensorParallel = Annotated[
    int | None, typer.Option(help="Ranks to split over (default: every GPU).", metavar="N")
]
ExpertParallel = Annotated[
    bool, typer.Option("--expert-parallel", help="Whole experts per rank, not slices of all.")
]
Streams = Annotated[
    int | None, typer.Option(help="Requests that decode at once (default 6).", metavar="N")
]
Context = Annotated[
    int | None, typer.Option(help="Longest conversation in tokens.", metavar="TOKENS")
]
HostShare = Annotated[
    float | None,
    typer.Option(
        help="Share of the experts to keep on the host, 0 to 1 (default: what does not fit)."
    ),
]
HeatFile = Annotated[
    Path | None, typer.Option("--heat", help="Routing counts to rank experts by.", metavar="FILE")
]


def policy(**wishes: Any) -> Policy:
    """The planner's request; what is None is left to the planner's default."""
    from appliance.plan.request import Policy

    return Policy(**{name: value for name, value in wishes.items() if value is not None})


def heat(path: Path | None) -> Heat | None:
    from appliance.errors import UsageError
    from appliance.plan.routing import heat_from_json

    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the routing counts {path}: {error}") from error
    return heat_from_json(text, str(path))


def machine(recorded: Path | None) -> Host:
    """This machine, or the one recorded in a folder."""
    from appliance.errors import UsageError
    from preflight import Live, Recorded, inspect
    from preflight.answers import Unreadable

    try:
        return inspect(Live() if recorded is None else Recorded(recorded))
    except Unreadable as error:
        raise UsageError(f"cannot replay a machine: {error}") from error
