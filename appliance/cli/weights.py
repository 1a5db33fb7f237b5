"""weights synth, weights show: checkpoints on disk."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.errors import UsageError

group = typer.Typer(
    help="Checkpoints and the store of them: fetch, prove, switch, hand on, make a small one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Triple = tuple[float, float, float]
FAMILIES_HELP = (
    "qwen3_moe, deepseek_v3, glm4_moe, mixtral or deepseek_v41, three layers of it "
    "(default qwen3_moe)."
)


@group.command()
def synth(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    family: Annotated[str | None, typer.Option(help=FAMILIES_HELP)] = None,
    layers: Annotated[int | None, typer.Option(help="Layers in all (default 4).")] = None,
    dense_layers: Annotated[
        int | None, typer.Option(help="Of these, the first so many without experts (default 1).")
    ] = None,
    experts: Annotated[
        int | None, typer.Option(help="Routed experts a layer (default 16).")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Experts that each token uses (default 4).")
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option(help="Values between layers, a multiple of 128 (default 256).")
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Values within an expert, a multiple of 128 (default 256).")
    ] = None,
    bits: Annotated[
        Triple | None,
        typer.Option(
            help="Bits a weight of gate, up and down, 1 to 8 (default 3 3 3).",
            metavar="GATE UP DOWN",
        ),
    ] = None,
    codebook: Annotated[str | None, typer.Option(help="3inst, mcg or mul1 (default mcg).")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Other weights for another number (default 0).")
    ] = None,
    headers_only: Annotated[
        str | None,
        typer.Option(
            help="Instead: a large model's headers in sparse files of the true size, to plan it.",
            metavar="MODEL",
        ),
    ] = None,
    known_answers: Annotated[
        bool, typer.Option("--known-answers", help="Also work out expectations.json (20 s).")
    ] = False,
) -> None:
    """Make a small valid EXL3 checkpoint that the engine can serve. Same options, same bytes."""
    from appliance.checkpoint.synth import SynthSpec, synthesize

    asked = {
        name: value
        for name, value in locals().items()
        if name in SynthSpec.__slots__ and value is not None
    }
    if headers_only is not None:
        if asked or known_answers:
            raise UsageError("--headers-only makes a model as it is: no other option goes with it")
        make_headers(out, headers_only)
        return
    spec = SynthSpec(**asked)
    with render.Progress(f"making a {spec.family} checkpoint in {out}") as progress:
        synthesize(out, spec, progress=lambda what, done, total: progress.advance(done, total))
    if known_answers:
        try:
            with render.Progress("working out known answers without the engine", 20.0):
                make_known_answers(out)
        except BaseException:
            shutil.rmtree(out)  # what was asked for is not there, and a second run needs the room
            raise
    render.data(str(out))


def make_headers(out: Path, model: str) -> None:
    from appliance.checkpoint.synth import headers_only

    with render.Progress(f"writing the headers of {model} in {out}") as progress:
        headers_only(out, model, progress=lambda what, done, total: progress.advance(done, total))
    render.data(str(out))


def make_known_answers(model: Path) -> None:
    from appliance.serve.answers import make_expectations
    from appliance.settings import inherited_environment, read_settings

    with tempfile.TemporaryDirectory() as aside:
        python = read_settings().engine_python
        make_expectations(model, python, inherited_environment(), Path(aside) / "answers.log")


@group.command()
def show(
    model: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a checkpoint.")],
    json: options.Json = False,
) -> None:
    """What a checkpoint holds, from its headers alone: layers, experts, bits, exact bytes."""
    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.cli.view import checkpoint_rows

    with render.Progress(f"reading the headers of {model}"):
        checkpoint = read_checkpoint(model.absolute())
    for warning in checkpoint.warnings:
        render.say(f"warning: {warning}")
    rows = checkpoint_rows(checkpoint)
    if json:
        render.as_json(dict(rows))
    else:
        render.table([(n, render.size(v) if v and n.endswith("bytes") else v) for n, v in rows])
