"""What a container does when it starts: preflight -> plan -> bind -> engine, each its exit code.

A step that fails says why, leaves the reason in the state directory and ends with its own code.
With `hold_on_failure` the container stays up instead, alive but not ready, so that nobody has to
read a crash loop: its agent answers with the reason, and `exec` works.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from appliance.agent import Agent, attend
from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.errors import ApplianceError, CheckFailed, ServeError, UsageError
from appliance.plan.check import check_plan
from appliance.plan.guards import guard
from appliance.plan.model import Plan, load_plan
from appliance.plan.planner import plan as make_plan
from appliance.plan.request import Policy
from appliance.serve.measured import with_kept_rates
from appliance.serve.prepare import GUARD_IDS
from appliance.serve.run import StopRequest
from appliance.serve.spec import ServeSpec, Wishes, spec
from appliance.serve.state import SERVING, Files, State, make_folder, write_aside
from appliance.settings import Settings
from preflight import Host, Live, Needs, Report, check, inspect, plan_needs, profile

FAILURE = "failure.json"
PREBUILT = Path("/opt/kernels/triton")  # made by image/compile.py
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "HF_HOME": "huggingface",
    "XDG_CACHE_HOME": "xdg",
}


@dataclass
class Launch:
    """What the steps know so far."""

    settings: Settings
    files: Files
    model: Path
    policy: Policy
    wishes: Wishes
    inherited: Mapping[str, str]
    say: Callable[[str], None]
    observe: Callable[[State], None]
    stop: StopRequest
    agent: Agent | None = None
    host: Host | None = None
    report: Report | None = None
    checkpoint: Checkpoint | None = None
    plan: Plan | None = None
    spec: ServeSpec | None = None
    served: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def preflight(launch: Launch) -> None:
    """Is this machine good enough for what was asked, before the model is even looked at?"""
    settings = launch.settings
    launch.host = inspect(Live(settings.host_root))
    needs = profile(
        gpus=settings.tensor_parallel or 1,
        device=settings.device or "cuda",
        deployment=_inside(settings),
        host_bytes=0 if settings.device == "cpu" else None,
    )
    _require(launch, needs)


def plan(launch: Launch) -> None:
    """Every expert gets a home; a plan that was given is checked against model and machine."""
    host, settings = launch.host, launch.settings
    assert host is not None
    launch.checkpoint = read_checkpoint(launch.model)
    if settings.plan is not None:
        launch.plan = load_plan(settings.plan)
        check_plan(launch.plan, host, launch.checkpoint)
        path = settings.plan
    else:
        measured = with_kept_rates(host, launch.files)
        launch.plan = make_plan(measured, launch.checkpoint, None, launch.policy)
        path = launch.files.plan
        launch.plan.write(path)
    devices = {rank.device for rank in launch.plan.ranks}
    if settings.device is not None and devices != {settings.device}:
        raise CheckFailed(
            f"this image serves on {settings.device}, and the plan is for {', '.join(devices)}",
            fix="give the container its GPUs (docker: --gpus all), or run the other flavour",
        )
    launch.spec = spec(launch.plan, launch.checkpoint.path, path, launch.wishes, launch.files)


def bind(launch: Launch) -> None:
    """What the plan needs of this container exactly: memory locks, shared memory, nodes, CPUs."""
    assert launch.plan is not None and launch.checkpoint is not None and launch.host is not None
    needs = plan_needs(launch.plan.model_dump(mode="json"), deployment=_inside(launch.settings))
    _require(launch, needs)
    ignored = _ignored(launch.settings)
    for rail in guard(launch.plan, launch.host):
        if rail.severity == "fail" and rail.check not in ignored:
            raise CheckFailed(f"{rail.check}: {rail.saw}", fix=rail.fix)
    cpus = {cpu for rank in launch.plan.ranks for cpu in _cpu_list(rank.cpus)}
    if cpus:
        allowed = os.sched_getaffinity(0)
        if not cpus & allowed:
            raise CheckFailed(
                f"the plan's CPUs are not among the {len(allowed)} this container may use",
                fix="raise the container's cpuset, or make the plan again in it",
            )
        os.sched_setaffinity(0, cpus & allowed)
    launch.environment = {
        **launch.inherited, **_caches(launch.files, launch.settings, launch.checkpoint, launch.plan)
    }  # fmt: skip


def engine(launch: Launch) -> None:
    """Serve until stopped. A hung engine is started again once; a dead one ends the container."""
    assert launch.spec is not None and launch.agent is not None

    def observe(state: State) -> None:
        launch.served |= state.phase in SERVING
        launch.observe(state)

    attend(launch.agent, launch.spec, launch.environment, observe, launch.stop, launch.say)


@dataclass(frozen=True)
class Step:
    name: str
    exit_code: int
    run: Callable[[Launch], None]


# 0 stopped when asked to; 2 a setting makes no sense.
STEPS = (
    Step("preflight", 3, preflight),
    Step("plan", 5, plan),
    Step("bind", 6, bind),
    Step("engine", 7, engine),
)


def run(launch: Launch, until: str = STEPS[-1].name) -> int:
    """The steps up to and with `until`; the exit code of the container."""
    make_folder(launch.files)
    with contextlib.suppress(OSError):
        (launch.files.folder / FAILURE).unlink()
    assert launch.agent is not None
    for step in STEPS:
        launch.agent.step = step.name
        launch.say(f"{step.name}: {(step.run.__doc__ or '').splitlines()[0]}")
        try:
            _do(step, launch)
        except ApplianceError as error:
            code = UsageError.exit_code if isinstance(error, UsageError) else step.exit_code
            _failed(launch, step, error, code)
            # An engine that died while it served is started again by whoever runs the container.
            if launch.settings.hold_on_failure and not launch.served:
                _hold(launch)
            return code
        if launch.stop.count or step.name == until:
            break
    return 0


def _do(step: Step, launch: Launch) -> None:
    """Raises ApplianceError alone: a full disk is held and told like any other failure."""
    try:
        step.run(launch)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ServeError(f"{where}{error.strerror or error}") from error


def _require(launch: Launch, needs: Needs) -> None:
    assert launch.host is not None
    try:
        report = check(launch.host, needs, _ignored(launch.settings) - GUARD_IDS)
    except ValueError as error:
        raise UsageError(str(error), fix="correct APPLIANCE_IGNORE_CHECKS") from error
    launch.report = report
    launch.say(report.text().rstrip())
    if report.failures:
        first = report.failures[0]
        more = f" (and {len(report.failures) - 1} more)" if len(report.failures) > 1 else ""
        raise CheckFailed(f"{first.check}: {first.saw}{more}", fix=first.fix)


def _ignored(settings: Settings) -> frozenset[str]:
    return frozenset(name for name in settings.ignore_checks.split(",") if name)


def _inside(settings: Settings) -> Literal["local", "kubernetes"]:
    """Docker's own checks are for the host: neither daemon nor toolkit is seen from inside."""
    return "kubernetes" if settings.deployment == "kubernetes" else "local"


def _failed(launch: Launch, step: Step, error: ApplianceError, code: int) -> None:
    assert launch.agent is not None
    launch.agent.last_finding = f"{step.name} failed: {error}"
    launch.say(f"error: {step.name} failed (exit code {code}): {error.message}")
    if error.fix is not None:
        launch.say(f"  fix: {error.fix}")
    failure = {
        "step": step.name,
        "exit_code": code,
        "message": error.message,
        "fix": error.fix,
        "at": time.time(),
    }
    try:
        write_aside(launch.files.folder / FAILURE, json.dumps(failure, indent=1) + "\n")
    except ServeError as problem:
        launch.say(f"  {problem.message}: only this log says why")


def _hold(launch: Launch) -> None:
    assert launch.agent is not None
    launch.agent.held = True
    launch.say("staying up, not ready, until stopped (APPLIANCE_HOLD_ON_FAILURE)")
    while not launch.stop.count:
        time.sleep(0.2)


def _caches(files: Files, settings: Settings, checkpoint: Checkpoint, made: Plan) -> dict[str, str]:
    """Compile caches of this image on this architecture for this checkpoint and plan only.

    A cache of another one replays code for other shapes (FACTS section 5, row 16).
    """
    gpus = "|".join(sorted({rank.gpu_name or rank.device for rank in made.ranks}))
    image = settings.image_digest or settings.release or "unreleased"
    parts = (image, platform.machine(), gpus, checkpoint.digest, made.digest)
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    folder = files.folder / "cache" / key
    folder.mkdir(parents=True, exist_ok=True)
    if PREBUILT.is_dir():
        # What Triton would need a compiler for; there is none in the image.
        shutil.copytree(PREBUILT, folder / CACHES["TRITON_CACHE_DIR"], dirs_exist_ok=True)
    return {name: str(folder / part) for name, part in CACHES.items()}


def _cpu_list(text: str | None) -> set[int]:
    found: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
