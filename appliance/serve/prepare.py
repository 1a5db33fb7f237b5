"""From what the operator asked for to a ServeSpec: read the model, make or check its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.errors import UsageError
from appliance.plan.check import check_plan
from appliance.plan.model import Plan, load_plan
from appliance.plan.planner import plan as make_plan
from appliance.plan.request import Policy
from appliance.plan.routing import Heat
from appliance.serve.spec import ServeSpec, Wishes, spec
from appliance.serve.state import Files, State, already_running, make_folder, read_state
from preflight import Host, Live, inspect


@dataclass(frozen=True)
class Request:
    """What to serve. Without a model: what was served last from this state directory.

    With `plan_path` that plan is checked against model and machine; without one, a plan is made
    by `policy` and `heat` and, unless `dry_run`, written to the state directory.
    """

    model: Path | None
    plan_path: Path | None
    policy: Policy
    heat: Heat | None = None
    dry_run: bool = False


def prepare(request: Request, wishes: Wishes, files: Files) -> ServeSpec:
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
    return spec(plan, checkpoint.path, plan_path, wishes, files)


def _as_last_time(request: Request, last: State | None) -> Request:
    if last is None:
        raise UsageError(
            "which model? Nothing was served yet from this state directory",
            fix="appliance up --model DIR, or appliance demo",
        )
    return replace(request, model=last.model)


def _made(request: Request, host: Host, checkpoint: Checkpoint, files: Files) -> Plan:
    plan = make_plan(host, checkpoint, request.heat, request.policy)
    if not request.dry_run:
        make_folder(files)
        plan.write(files.plan)
    return plan
