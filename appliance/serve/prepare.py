"""From what the operator asked for to a ServeSpec: read the model, make or check its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.errors import CheckFailed, UsageError
from appliance.plan.check import check_plan
from appliance.plan.guards import GUARDS, guard
from appliance.plan.model import Plan, load_plan
from appliance.plan.planner import plan as make_plan
from appliance.plan.request import Policy
from appliance.plan.routing import Heat
from appliance.serve.asked import Asked, as_planned
from appliance.serve.measured import with_kept_rates
from appliance.serve.spec import ServeSpec, Wishes, spec
from appliance.serve.state import Files, State, already_running, make_folder, read_state
from preflight import Finding, Host, Live, check, inspect, plan_needs
from preflight.report import UnknownCheck

GUARD_IDS = frozenset(rail.id for rail in GUARDS)


@dataclass(frozen=True)
class Request:
    """What to serve. Without a model: what was served last from this state directory.

    With `plan_path` that plan is checked against model and machine; without one, a plan is made
    by `policy` and `heat` and, unless `dry_run`, written to the state directory. A check of the
    machine that fails for the plan's needs stops it, unless its id is in `ignore` or all are
    ignored (`ignore` is None); then it is among the findings. `asked`: what is recorded as asked
    for; None: this request and its wishes.
    """

    model: Path | None
    plan_path: Path | None
    policy: Policy
    heat: Heat | None = None
    dry_run: bool = False
    ignore: tuple[str, ...] | None = ()
    heat_files: tuple[Path, ...] = ()
    asked: Asked | None = None


@dataclass(frozen=True)
class Prepared:
    """What is about to be started, the plan it obeys, and what the checks found."""

    spec: ServeSpec
    plan: Plan
    checkpoint: Checkpoint
    findings: tuple[Finding, ...]


def prepare(request: Request, wishes: Wishes, files: Files) -> Prepared:
    """Raises ApplianceError with the first thing that is wrong with model, plan or machine."""
    last = read_state(files)
    if last is not None and last.supervisor_is_running and not request.dry_run:
        raise already_running(files)  # before its plan.json is written over
    if request.model is None:
        request = _as_last_time(request, last)
    assert request.model is not None
    checkpoint = read_checkpoint(request.model.absolute())
    host = inspect(Live())
    if request.plan_path is not None:
        plan, plan_path = load_plan(request.plan_path), request.plan_path
        check_plan(plan, host, checkpoint)
    else:
        plan, plan_path = _made(request, host, checkpoint, files), files.plan
    made = spec(plan, checkpoint.path, plan_path, wishes, files)
    made = replace(made, asked=request.asked or _asked(request, wishes, files, plan))
    return Prepared(made, plan, checkpoint, _findings(host, plan, request.ignore))


def _asked(request: Request, wishes: Wishes, files: Files, plan: Plan) -> Asked:
    given = request.plan_path is not None
    return Asked(
        host=wishes.host,
        port=wishes.port,
        served_name=wishes.served_name,
        keys=files.keys,
        tls=wishes.tls,
        certificate=wishes.certificate,
        certificate_key=wishes.certificate_key,
        policy=as_planned(request.policy, plan) if given else request.policy,
        plan=request.plan_path and request.plan_path.absolute(),
        heat=tuple(path.absolute() for path in request.heat_files),
    )


def _findings(host: Host, plan: Plan, ignore: tuple[str, ...] | None) -> tuple[Finding, ...]:
    """What the machine's checks and the plan's guard rails found, failures first."""
    ignored = frozenset(ignore or ())
    try:
        report = check(host, plan_needs(plan.model_dump(mode="json")), ignored - GUARD_IDS)
    except UnknownCheck as error:
        raise UsageError(str(error)) from error
    rails = guard(plan, host)
    failures = [
        *report.failures,
        *(one for one in rails if one.severity == "fail" and one.check not in ignored),
    ]
    if failures and ignore is not None:
        shown = "; ".join(f"{one.check}: {one.saw}" for one in failures)
        raise CheckFailed(
            f"this machine does not meet the plan's needs: {shown}",
            fix="`appliance preflight` says what to change; --ignore ID goes on all the same",
        )
    return (*report.failures, *report.warnings, *rails)


def _as_last_time(request: Request, last: State | None) -> Request:
    if last is None:
        raise UsageError(
            "which model? Nothing was served yet from this state directory",
            fix="appliance up --model DIR, or appliance demo",
        )
    return replace(request, model=last.model)


def _made(request: Request, host: Host, checkpoint: Checkpoint, files: Files) -> Plan:
    measured = with_kept_rates(host, files)
    plan = make_plan(measured, checkpoint, request.heat, request.policy)
    if not request.dry_run:
        make_folder(files)
        plan.write(files.plan)
    return plan
