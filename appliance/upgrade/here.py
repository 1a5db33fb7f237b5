"""The world of one host: deployments are supervisors of the local state directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.errors import CheckFailed, ServeError, UsageError
from appliance.plan.check import check_plan
from appliance.plan.model import load_plan
from appliance.plan.planner import plan as make_plan
from appliance.plan.request import Policy
from appliance.serve import local
from appliance.serve.canary import ask_twice
from appliance.serve.drain import admit, drain
from appliance.serve.measured import with_kept_rates
from appliance.serve.prepare import Request, prepare
from appliance.serve.spec import ServeSpec, Wishes
from appliance.serve.state import SERVING, Files, read_state
from appliance.upgrade.book import BOOK, Deployment, read_book
from appliance.upgrade.migrate import migrate
from preflight import Live, check, inspect, plan_needs

STOP_SECONDS = 120.0


@dataclass
class Here:
    """`supervisor` makes the command line that supervises a spec in the foreground, with the checks
    whose failure only warns. `policy`: what the planner is asked for a model without a plan.
    """

    files: Files
    wishes: Wishes
    supervisor: Callable[[ServeSpec, Sequence[str]], Sequence[str]]
    inherited: Mapping[str, str]
    drain_seconds: float
    ignore: tuple[str, ...] = ()
    policy: Policy = field(default_factory=Policy)

    def served(self) -> Deployment:
        """What runs now, as a deployment. Raises UsageError where nothing does."""
        state = read_state(self.files)
        if state is None or state.phase not in SERVING or not state.supervisor_is_running:
            raise UsageError("nothing is served yet", fix="appliance up --model DIR --detach")
        return Deployment(
            release="as started", model=state.model, plan=self._kept(state.plan),
            plan_digest=state.plan_digest,
        )  # fmt: skip

    def pull(self, target: Deployment) -> None:
        if not target.model.is_dir():
            raise ServeError(
                f"there is no checkpoint at {target.model}", fix="appliance weights pull"
            )

    def verify(self, target: Deployment) -> None:
        read_checkpoint(target.model)

    def preflight(self, target: Deployment) -> None:
        if target.plan is None:
            return  # the plan is made in the next step, for this machine
        needs = plan_needs(load_plan(target.plan).model_dump(mode="json"))
        failures = check(inspect(Live()), needs, self.ignore).failures
        if failures:
            raise CheckFailed(f"{failures[0].check}: {failures[0].saw}", fix=failures[0].fix)

    def plan(self, target: Deployment) -> Deployment:
        checkpoint, host = read_checkpoint(target.model), inspect(Live())
        if target.plan is not None:
            made = load_plan(target.plan)
            check_plan(made, host, checkpoint)
            path = target.plan
        else:
            # The bytes that the old one holds are not free now, and will be.
            measured = with_kept_rates(host, self.files)
            made = make_plan(measured, checkpoint, None, self.policy)
            path = self._plans() / f"{made.digest}.json"
            made.write(path)
        return target.model_copy(update={"plan": path, "plan_digest": made.digest})

    def drain(self) -> None:
        drain(self.files, self.drain_seconds)

    def stop(self) -> None:
        local.stop(self.files, lambda state: None, STOP_SECONDS)

    def start(self, deployment: Deployment) -> None:
        if self.serves(deployment):
            return
        wishes = self._wishes()
        self.stop()
        # What has served here serves again, also where `up --ignore` was what let it.
        known = read_book(self.files.folder / BOOK).current == deployment
        ignore = None if known else self.ignore
        request = Request(deployment.model, deployment.plan, self.policy, ignore=ignore)
        made = prepare(request, wishes, self.files)
        failed = {one.check for one in made.findings if one.severity == "fail"}
        argv = self.supervisor(made.spec, sorted({*self.ignore, *failed}))
        local.detach(argv, made.spec, self.inherited, lambda state: None)

    def _wishes(self) -> Wishes:
        """Clients find the new one where the old one was, also where `up` was told another place
        or name than the settings have."""
        state = read_state(self.files)
        if state is None:
            return self.wishes
        given = state.served_name != state.model.name  # else it follows the model's folder
        name = state.served_name if given else self.wishes.served_name
        return replace(self.wishes, host=state.host, port=state.port, served_name=name)

    def prove(self, deployment: Deployment) -> None:
        state = read_state(self.files)
        certificate = None if state is None else state.certificate
        now = self._wishes()
        ask_twice(now.host, now.port, self.files.keys, certificate)

    def serves(self, deployment: Deployment) -> bool:
        state = read_state(self.files)
        return (
            state is not None
            and state.phase in SERVING
            and state.supervisor_is_running
            and state.engine_is_running
            and (state.model, state.plan_digest) == (deployment.model, deployment.plan_digest)
        )

    def admit(self) -> None:
        admit(self.files)

    def migrate(self, version: int, knows: Deployment) -> None:
        migrate(self.files.folder, version)

    def recorded(self, deployment: Deployment) -> Deployment:
        return deployment

    def _plans(self) -> Path:
        folder = self.files.folder / "plans"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _kept(self, path: Path) -> Path:
        """A copy under the plan's own name: the state directory's plan.json is written again."""
        made = load_plan(path)
        kept = self._plans() / f"{made.digest}.json"
        made.write(kept)
        return kept
