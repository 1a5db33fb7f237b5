"""up: one appliance on this host. What runs is running.py's."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.cli.planning import own_plan_lines
from appliance.cli.watch import watched
from appliance.plan.request import Policy
from appliance.settings import Settings, inherited_environment, read_settings

if TYPE_CHECKING:
    from appliance.serve.asked import Served
    from appliance.serve.prepare import Prepared
    from appliance.serve.run import StopRequest
    from appliance.serve.spec import ServeSpec, Wishes
    from appliance.serve.state import Files, State

PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="Serve this plan instead of making one.")
]
Port = Annotated[
    int | None, typer.Option(help="Port to serve on (default 8000).", min=1, max=65535)
]
HostName = Annotated[
    str | None, typer.Option(help="Address to bind (default 127.0.0.1: this host only).")
]


def register(app: typer.Typer) -> None:
    app.command()(options.takes_policy(up))


def files_of(settings: Settings) -> Files:
    from appliance.serve.state import Files

    return Files.of(settings.state_dir, settings.gateway_keys)


def wishes_of(
    settings: Settings, *, host: str | None = None, port: int | None = None, name: str | None = None
) -> Wishes:
    """The settings, and over them what the command line says."""
    from appliance.serve.spec import Wishes

    return Wishes(
        engine_python=settings.engine_python,
        host=host or settings.host,
        port=port or settings.port,
        served_name=name or settings.served_name,
        drain_seconds=settings.drain_seconds,
        start_limit_seconds=settings.start_limit_seconds,
        max_body_bytes=settings.gateway_max_body_bytes,
        max_header_bytes=settings.gateway_max_header_bytes,
        exl3_owner=settings.exl3_owner,
        arena=settings.weights_arena,
        tls=settings.tls,
        certificate=settings.tls_certificate,
        certificate_key=settings.tls_key,
    )


def up(
    model: options.Model = None,
    plan: PlanFile = None,
    host: HostName = None,
    port: Port = None,
    name: Annotated[str | None, typer.Option(help="Model name in the API.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once it serves.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the engine's exact command; start nothing.")
    ] = False,
    *,
    policy: Policy,
    heat: options.HeatFiles = None,
    ignore: options.Ignore = None,
    asked: Annotated[
        str | None, typer.Option(hidden=True, help="What the starter records as asked for.")
    ] = None,
    line: typer.Context,
) -> int:
    """Plan a model on this machine, start the engine, prove it, serve it.

    Without --model: what was served last time, as and where it was, but for what is said now.
    Stop with Ctrl-C or `appliance down`.
    """
    from appliance.serve.asked import Asked, read_served
    from appliance.serve.prepare import Request, prepare
    from appliance.serve.state import only_start

    settings = read_settings()
    last = None if model or settings.model else read_served(files_of(settings))
    if last is not None:
        said = options.said(line)
        policy = _policy_as_last(policy, last, said | settings.model_fields_set)
        settings = _as_last(settings, last, replan=bool(said))
        heat = heat or list(last.asked.heat)
    ignored = (*(ignore or ()), *filter(None, settings.ignore_checks.split(",")))
    request = Request(
        model or settings.model,
        plan or settings.plan,
        policy,
        options.heat(heat),
        dry_run,
        ignored,
        tuple(heat or ()),
        Asked.model_validate_json(asked) if asked else None,
    )
    wishes, files = wishes_of(settings, host=host, port=port, name=name), files_of(settings)
    # Whoever started this process with what was asked holds that lock.
    with nullcontext() if dry_run or asked else only_start(files):
        with render.Progress("reading the checkpoint, the machine and the plan"):
            prepared = prepare(request, wishes, files)
        say_findings(prepared)
        spec = prepared.spec
        if request.plan_path is None:
            for words in own_plan_lines(prepared.plan, spec.plan_path, written=not dry_run):
                render.say(words)
        if dry_run:
            render.data(spec.command())
            return 0
        if not detach:
            return supervise_here(spec)
        start_detached(spec, ignored)
        return 0


def _as_last(settings: Settings, last: Served, *, replan: bool) -> Settings:
    """The settings, and where they say nothing what was asked for last time."""
    asked = last.asked
    before = {
        "model": last.model,
        "plan": None if replan else asked.plan,
        "host": asked.host,
        "port": asked.port,
        "served_name": asked.served_name,
        "gateway_keys": asked.keys,
    }
    if "tls" not in settings.model_fields_set:
        before |= {
            "tls": asked.tls,
            "tls_certificate": asked.certificate,
            "tls_key": asked.certificate_key,
        }
    kept = {name: v for name, v in before.items() if name not in settings.model_fields_set}
    return settings.model_copy(update=kept)


def _policy_as_last(policy: Policy, last: Served, said: Set[str]) -> Policy:
    """The wishes of last time, and over them what is said now."""
    now = {name: getattr(policy, name) for name in said & options.POLICY_FIELDS}
    return replace(last.asked.policy, **now)


def say_findings(prepared: Prepared) -> None:
    for warning in prepared.checkpoint.warnings:
        render.say(f"warning: {warning}")
    for finding in prepared.findings:
        fix = f" (fix: {finding.fix})" if finding.fix else ""
        render.say(f"warning: {finding.check}: {finding.saw}{fix}")


def start_detached(spec: ServeSpec, ignore: Iterable[str]) -> State:
    """Start a supervisor of its own session, wait until it serves."""
    from appliance.serve import local

    argv = supervisor_argv(spec, ignore)
    with watched() as observe:
        return local.detach(argv, spec, environment_of(spec), observe)


def environment_of(spec: ServeSpec) -> dict[str, str]:
    """What the engine or its supervisor inherits: this process's, and what was asked for."""
    return {**inherited_environment(), **(spec.asked.variables() if spec.asked else {})}


def supervisor_argv(spec: ServeSpec, ignore: Iterable[str]) -> list[str]:
    """The command line that supervises exactly this spec in the foreground."""
    return [
        *(sys.executable, "-m", "appliance.cli", "up"),
        *("--model", str(spec.model), "--plan", str(spec.plan_path), "--name", spec.served_name),
        *("--host", spec.host, "--port", str(spec.port)),
        *(f"--ignore={check}" for check in ignore),
        *(() if spec.asked is None else ("--asked", spec.asked.model_dump_json())),
    ]


def supervise_here(spec: ServeSpec) -> int:
    """Serve in the foreground until a signal says stop."""
    from appliance.agent import Agent, attend
    from appliance.cli.view import metrics_page
    from appliance.plan.model import load_plan
    from appliance.serve.run import StopRequest

    settings, stop = read_settings(), StopRequest()
    port = settings.agent_port
    address = None if port is None else (settings.agent_host, port)
    plan = load_plan(spec.plan_path)
    agent = Agent(
        spec.files,
        address,
        settings.hang_seconds,
        lambda agent: metrics_page(agent, spec.files, settings, plan=plan),
    )
    with stopping_on_signals(stop), watched() as observe, agent:
        last = attend(agent, spec, inherited_environment(), observe, stop, render.say)
    render.say(last.message or "stopped")
    return 130 if stop.number == signal.SIGINT else 0


@contextmanager
def stopping_on_signals(stop: StopRequest) -> Iterator[None]:
    """SIGTERM, Ctrl-C, and a terminal that goes away, unless nohup has that ignored."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {n: signal.signal(n, stop.ask) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
