"""container, health: what the image runs, and what asks it how it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.cli.demo import CONTEXT_TOKENS, HOST_SHARE, STREAMS, make_model
from appliance.cli.demo import NAME as DEMO
from appliance.cli.serving import files_of, stopping_on_signals, wishes_of
from appliance.settings import Settings, inherited_environment, read_settings

if TYPE_CHECKING:
    from appliance.agent import Agent
    from appliance.container import Launch

AGENT_PORT = 8001


def register(app: typer.Typer) -> None:
    app.command()(container)
    app.command()(health)
    app.command()(canary)


def container(
    demo: Annotated[bool, typer.Option("--demo", help="Make and serve the small model.")] = False,
    until: Annotated[
        str, typer.Option(help="Last step to do: preflight, plan, bind or engine.")
    ] = "engine",
) -> int:
    """What the image runs: preflight, plan, bind, engine, with health beside it.

    Settings come from APPLIANCE_* variables. Exit codes: 0 stopped when asked to, 2 a setting
    makes no sense, 3 preflight failed, 5 no plan, 6 the container cannot hold it, 7 the engine.
    """
    from appliance.agent import Agent
    from appliance.container import STEPS, run
    from appliance.errors import UsageError
    from appliance.serve.run import StopRequest
    from appliance.serve.state import make_folder

    settings = read_settings()
    if until not in [step.name for step in STEPS]:
        raise UsageError(f"there is no step {until}", fix="preflight, plan, bind or engine")
    files = files_of(settings)
    make_folder(files)
    stop = StopRequest()
    launch = _launch(settings, demo, stop)
    agent = Agent(
        files,
        (settings.agent_host, settings.agent_port or AGENT_PORT),
        settings.hang_seconds,
        lambda agent: _page(agent, launch),
    )
    launch.agent = agent
    with stopping_on_signals(stop), agent:
        if demo and until != STEPS[0].name:
            agent.step = "making the small model"
            make_model(launch.model, settings)
        return run(launch, until)


def _launch(settings: Settings, demo: bool, stop: object) -> Launch:
    from appliance.container import Launch
    from appliance.errors import UsageError
    from appliance.serve.run import StopRequest

    assert isinstance(stop, StopRequest)
    files = files_of(settings)
    model = files.folder / "demo" / DEMO if demo else settings.model
    if model is None:
        raise UsageError(
            "which model? APPLIANCE_MODEL is not set",
            fix="set it to the folder of an EXL3 checkpoint, or run with --demo",
        )
    asked = settings
    if demo:
        asked = settings.model_copy(
            update={
                "streams": settings.streams or STREAMS,
                "context_tokens": settings.context_tokens or CONTEXT_TOKENS,
                "host_share": HOST_SHARE if settings.host_share is None else settings.host_share,
            }
        )
    return Launch(
        settings=settings,
        files=files,
        model=model,
        policy=options.asked_by(asked),
        wishes=wishes_of(settings, name=settings.served_name or (DEMO if demo else None)),
        inherited=inherited_environment(),
        say=render.say,
        observe=_Told(),
        stop=stop,
    )


class _Told:
    """One line for each phase: a container's log is read later."""

    def __init__(self) -> None:
        self._last: object = None

    def __call__(self, state: object) -> None:
        from appliance.serve.state import State

        assert isinstance(state, State)
        if (state.phase, state.message) != self._last:
            self._last = (state.phase, state.message)
            render.say(f"engine: {state.phase}" + (f": {state.message}" if state.message else ""))


def _page(agent: Agent, launch: Launch) -> str:
    from appliance.cli.view import metrics_page

    return metrics_page(
        agent, launch.files, launch.settings, host=launch.host, report=launch.report,
        plan=launch.plan,
    )  # fmt: skip


def health(
    quiet: Annotated[bool, typer.Option("--quiet", help="Only the exit code.")] = False,
    json: options.Json = False,
) -> int:
    """Does it serve, and if not, why not? Exit code 0: it does; 3: it does not, or not yet.

    1: nothing was ever started here, or nobody answers on the health port.
    """
    from appliance.cli.view import health_of, health_rows
    from appliance.errors import ServeError
    from appliance.serve import local
    from appliance.serve.client import ask_agent

    settings = read_settings()
    if settings.agent_port is None:
        found = local.status(files_of(settings))
        if found is None:
            raise ServeError("nothing was started yet", fix="appliance up, or appliance demo")
        ready, body = found.is_serving, health_of(found)
    else:
        answer = ask_agent(settings.agent_host, settings.agent_port)
        ready, body = answer.ready, answer.body
    if json:
        render.as_json(body)
    elif not quiet:
        render.table(health_rows(ready, body))
    return 0 if ready else 3


def canary(
    host: Annotated[
        str | None, typer.Argument(help="Where the API is; default: where this host's own is.")
    ] = None,
    port: Annotated[int | None, typer.Argument(min=1, max=65535)] = None,
    keys: Annotated[Path | None, typer.Option(help="File of API keys.")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="The server's certificate, where it speaks TLS.")
    ] = None,
) -> int:
    """Ask the running appliance the same thing twice: a greedy answer must come, and be the same.

    Also: the same request without the key must be refused. Exit code 3 where any of it fails.
    """
    from appliance.errors import ServeError
    from appliance.serve.canary import ask_twice
    from appliance.serve.state import SERVING, read_state

    settings = read_settings()
    files = files_of(settings)
    usual = {"off": None, "generated": files.certificate, "own": settings.tls_certificate}
    usual_keys, usual_certificate = files.keys, usual[settings.tls]
    if host is None:
        state = read_state(files)
        if state is None or state.phase not in SERVING or not state.supervisor_is_running:
            raise ServeError(
                "no appliance serves from this state directory",
                fix="`appliance up`, or say where one is: appliance canary HOST PORT --keys FILE",
            )
        host, port = state.host, state.port
        usual_keys, usual_certificate = state.keys, state.certificate
    tokens = ask_twice(
        host, port or settings.port, keys or usual_keys, certificate or usual_certificate
    )
    render.say(f"two greedy answers of {tokens} tokens agree; no key, no answer")
    return 0
