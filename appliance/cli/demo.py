"""demo: the whole road once, on a small model made on the spot."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from appliance import render
from appliance.cli import options, serving
from appliance.cli.view import home_rows
from appliance.errors import ServeError
from appliance.settings import Settings, inherited_environment, read_settings

if TYPE_CHECKING:
    from appliance.serve.client import Client
    from appliance.serve.state import Files, State

NAME = "demo"
QUESTION = "Where do idle experts wait?"
ANSWER_TOKENS = 64
STREAMS = 4
CONTEXT_TOKENS = 2048
ANSWERS_SECONDS = 20.0
HOST_SHARE = 0.5  # whatever the machine: both homes are to be seen


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    port: serving.Port = None,
) -> None:
    """Make a small model, plan it, serve it, ask it something, say where every expert lives."""
    from appliance.serve.client import Client
    from appliance.serve.keys import first_key

    settings = read_settings()
    files = serving.files_of(settings)
    model = settings.state_dir.absolute() / "demo" / NAME
    make_model(model, settings)
    state = running(files, model)
    if state is None:
        state = start(files, model, port)
    else:
        render.say(f"an earlier demo still serves on port {state.port}")
    before = engine_of(files)
    ask(Client(state.host, state.port, first_key(files.keys), state.certificate))
    say_where(state, since(before, engine_of(files)))


def make_model(model: Path, settings: Settings) -> None:
    from appliance.checkpoint.synth import SynthSpec, synthesize
    from appliance.serve.answers import EXPECTATIONS_FILE, make_expectations

    if model.exists():
        render.say(f"the small model of an earlier demo is in {model}")
    else:
        with render.Progress(f"making a small EXL3 model in {model}") as bar:
            synthesize(model, SynthSpec(), progress=lambda _, done, total: bar.advance(done, total))
    if not (model / EXPECTATIONS_FILE).exists():
        with render.Progress("working out known answers without the engine", ANSWERS_SECONDS):
            output = model.with_name("answers.log")
            make_expectations(model, settings.engine_python, inherited_environment(), output)


def running(files: Files, model: Path) -> State | None:
    """The demo's appliance if it still serves."""
    from appliance.serve import local

    found = local.status(files)
    here = found is not None and found.is_serving and found.state.model == model
    return found.state if found is not None and here else None


def start(files: Files, model: Path, port: int | None) -> State:
    from appliance.plan.explain import show_lines
    from appliance.serve.prepare import Request, prepare
    from appliance.serve.state import only_start

    policy = options.policy(
        streams=STREAMS, context_tokens=CONTEXT_TOKENS, host_share=HOST_SHARE, tensor_parallel=1
    )
    wishes = serving.wishes_of(read_settings(), port=port, name=NAME)
    # A small model serves on machines that a large one should not: every finding only warns.
    request = Request(model, None, policy, ignore=None)
    with only_start(files):
        with render.Progress("looking at this machine and planning every expert"):
            prepared = prepare(request, wishes, files)
        serving.say_findings(prepared)
        spec = prepared.spec
        render.say(f"the plan, in {spec.plan_path}:")
        for line in show_lines(prepared.plan):
            render.say(f"  {line}")
        return serving.start_detached(spec, {finding.check for finding in prepared.findings})


def ask(client: Client) -> None:
    """One streaming chat request through the OpenAI API, its text as it comes."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    render.say(f"\nasking: {QUESTION}   (a model of random weights answers in random words)\n")
    started, tokens = time.monotonic(), 0
    for event in client.events("/v1/chat/completions", body):
        for choice in event["choices"]:
            render.piece(choice["delta"].get("content") or "")
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    render.data("")
    if not tokens:
        raise ServeError("the engine streamed an answer without a token")
    render.say(f"\n{tokens} tokens in {render.duration(time.monotonic() - started)}")


def engine_of(files: Files) -> Any:
    from appliance.serve import local

    found = local.status(files)
    if found is None or found.engine is None:
        raise ServeError("the engine does not say where its experts are")
    return found.engine


def since(before: Any, after: Any) -> Any:
    """What the engine says `after`, its counters from `before` on: they count since its start."""
    ranks = []
    for old, new in zip(before["ranks"], after["ranks"], strict=True):
        picks = {home: count - old["picks"][home] for home, count in new["picks"].items()}
        read = new["host_bytes_read"] - old["host_bytes_read"]
        ranks.append({**new, "picks": picks, "host_bytes_read": read})
    return {**after, "ranks": ranks}


def say_where(state: State, engine: Any) -> None:
    program = sys.argv[0] if Path(sys.argv[0]).name == "appliance" else "appliance"
    command = shlex.quote(program)
    render.say("\nWhere every expert lives, and what was read from there for this one request:")
    render.table(home_rows(engine))
    render.say(f"\nOne expert, its home and why: {command} plan explain 1 0 {state.plan}")
    render.say("  (LAYER EXPERT; that file has all of them)")
    render.say(f"It serves on {state.url}/v1 with the key in {state.keys}")
    render.say(f"Stop it: {command} down")
