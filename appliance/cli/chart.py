"""plan values: what a plan says of the chart's values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from appliance import render
from appliance.cli.planning import HERE, plan_in

ENGINE_GIB = 16  # the engine's own memory and what of the page cache it needs while it loads
SHM_GIB = 8


def values(
    plan: Annotated[Path, typer.Argument(help="The plan.", metavar="FILE")] = HERE,
) -> None:
    """The chart's values that follow from a plan, as YAML: helm install -f FILE.

    GPUs, memory, and the predicted load, which the startup probe waits three times for.
    """
    from appliance.serve.spec import predicted_load_seconds

    made = plan_in(plan)
    host_gib = math.ceil(sum(rank.total_bytes("host") for rank in made.ranks) / (1 << 30))
    gpus = sum(rank.device == "cuda" for rank in made.ranks)
    lines = [
        f"# plan {made.digest[:12]}: {host_gib} GiB of the host for experts and tables",
        f"flavour: {'gpu' if gpus else 'cpu'}",
        f"gpus: {{count: {gpus}}}",
        f"resources: {{memoryGiB: {host_gib + ENGINE_GIB + SHM_GIB}, shmGiB: {SHM_GIB}}}",
        f"loadSeconds: {math.ceil(predicted_load_seconds(made))}",
    ]
    render.lines(lines)
