"""plan values: what a plan says of the chart's values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from appliance import render
from appliance.cli.planning import HERE, plan_in

# The engine's own memory and what of the page cache it needs while it loads. Without a GPU the
# ledger has all of it: 2.8 GiB where the processes of a small model together held 2.0.
ENGINE_GIB = {"gpu": 16, "cpu": 0}
SHM_GIB = {"gpu": 8, "cpu": 1}


def values(
    plan: Annotated[Path, typer.Argument(help="The plan.", metavar="FILE")] = HERE,
) -> None:
    """The chart's values that follow from a plan, as YAML: helm install -f FILE.

    GPUs, memory, and the longest predicted load, which the startup probe waits three times for.
    """
    from appliance.serve.spec import predicted_load_seconds

    made = plan_in(plan)
    gpus = sum(rank.device == "cuda" for rank in made.ranks)
    flavour = "gpu" if gpus else "cpu"
    host = sum(rank.total_bytes("host") for rank in made.ranks)
    what = "of the host for experts, tables and the engine"
    if not gpus:
        host += sum(rank.total_bytes("device") for rank in made.ranks)
        what = "in all: without a GPU both homes are RAM"
    gib = math.ceil(host / (1 << 30))
    memory, shm = gib + ENGINE_GIB[flavour] + SHM_GIB[flavour], SHM_GIB[flavour]
    said = None if made.forecast is None else made.forecast.load_seconds
    longest = predicted_load_seconds(made) if said is None else said.high
    lines = [
        f"# plan {made.digest[:12]}: {gib} GiB {what}",
        f"flavour: {flavour}",
        f"gpus: {{count: {gpus}}}",
        f"resources: {{memoryGiB: {memory}, shmGiB: {shm}}}",
        f"# predicted load: {predicted_load_seconds(made):.0f} s, at the longest {longest:.0f} s",
        f"loadSeconds: {math.ceil(longest)}",
    ]
    render.lines(lines)
