"""The world of one host: deployments are supervisors of the local state directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.errors import CheckFailed, ServeError, UsageError
from appliance.plan.check import check_plan
from appliance.plan.heat_files import read_heat
from appliance.plan.model import load_plan
from appliance.plan.planner import plan as make_plan
from appliance.plan.request import Policy
from appliance.serve import local
from appliance.serve.asked import Asked, read_served
from appliance.serve.canary import ask_twice
from appliance.serve.drain import admit, drain
from appliance.serve.measured import with_kept_rates
from appliance.serve.prepare import Request, prepare
from appliance.serve.spec import ServeSpec, Wishes
from appliance.serve.state import SERVING, Files, State, only_start, read_state
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
            plan_digest=state.plan_digest, asked=self._asked_of(state),
        )  # fmt: skip

    def is_what_serves(self, recorded: Deployment) -> bool:
        state = read_state(self.files)
        if state is None or state.phase not in SERVING or not state.supervisor_is_running:
            return True
        return self._same(state, recorded)

    def _same(self, state: State, deployment: Deployment) -> bool:
        """A deployment recorded by an earlier release does not say how it was asked for."""
        asked = deployment.asked is None or deployment.asked == self._asked_of(state)
        known = (deployment.model, deployment.plan_digest)
        return asked and (state.model, state.plan_digest) == known

    def _asked_of(self, state: State) -> Asked | None:
        last = read_served(self.files)
        if last is None or (last.model, last.plan_digest) != (state.model, state.plan_digest):
            return None  # started by an earlier release
        return last.asked

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
            asked = target.asked
            heat = read_heat(list(asked.heat)).heat if asked is not None and asked.heat else None
            policy = self.policy if asked is None else asked.policy
            made = make_plan(measured, checkpoint, heat, policy)
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
        asked = deployment.asked
        wishes = self._wishes() if asked is None else asked.wishes(self.wishes)
        files = self.files if asked is None else Files.of(self.files.folder, asked.keys)
        self.stop()
        # What has served here serves again, also where `up --ignore` was what let it.
        known = read_book(self.files.folder / BOOK).current == deployment
        ignore = None if known else self.ignore
        policy = self.policy if asked is None else asked.policy
        request = Request(deployment.model, deployment.plan, policy, ignore=ignore, asked=asked)
        with only_start(files):
            made = prepare(request, wishes, files)
            failed = {one.check for one in made.findings if one.severity == "fail"}
            argv = self.supervisor(made.spec, sorted({*self.ignore, *failed}))
            inherited = {**self.inherited, **(asked.variables() if asked else {})}
            local.detach(argv, made.spec, inherited, lambda state: None, left_starting=False)

    def _wishes(self) -> Wishes:
        """Of what was started by a release that kept no record of what was asked: clients find the
        new one where the old one was, also where the settings have another place or name."""
        state = read_state(self.files)
        if state is None:
            return self.wishes
        given = state.served_name != state.model.name  # else it follows the model's folder
        name = state.served_name if given else self.wishes.served_name
        return replace(self.wishes, host=state.host, port=state.port, served_name=name)

    def prove(self, deployment: Deployment) -> None:
        state = read_state(self.files)
        if state is None:
            raise ServeError("nothing is served")
        ask_twice(state.host, state.port, state.keys, state.certificate)

    def serves(self, deployment: Deployment) -> bool:
        state = read_state(self.files)
        return (
            state is not None
            and state.phase in SERVING
            and state.supervisor_is_running
            and state.engine_is_running
            and self._same(state, deployment)
        )

    def admit(self) -> None:
        admit(self.files)

    def migrate(self, version: int, knows: Deployment) -> None:
        migrate(self.files.folder, version)

    def recorded(self, deployment: Deployment) -> Deployment:
        state = read_state(self.files)
        asked = None if state is None else self._asked_of(state)
        return deployment.model_copy(update={"asked": asked})

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
