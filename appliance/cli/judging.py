"""A machine and what it is wanted for: the needs, the plan where there is a model, the report."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from appliance import render
from appliance.errors import ApplianceError, UsageError
from appliance.settings import Settings

if TYPE_CHECKING:
    from appliance.plan.model import Plan
    from appliance.plan.request import Policy
    from appliance.serve.state import Files
    from preflight import Finding, Host, Needs, Recording, Report
    from preflight.answers import Source


@dataclass
class Seen:
    """A machine that was looked at.

    `host` is what is reported: with a recording its identities are blanked, so that a replay says
    the same. `real` has them: plans name GPUs by UUID.
    """

    host: Host
    real: Host
    recording: Recording | None = None

    @classmethod
    def of(cls, source: Source, record: Path | None, folders: Mapping[str, str] | None) -> Seen:
        """`folders`: see preflight.inspect; None replays those of a recording."""
        from preflight import Recording, inspect

        with render.Progress("looking at the machine"):
            real = inspect(source, folders)
            if record is None:
                return cls(real, real)
            recording = Recording(source, record)
            return cls(inspect(recording, folders), real, recording)

    def measure(self, what: Wanted, model: Path | None, settings: Settings) -> None:
        """Put what a child process measured among the facts, and in the recording blanked."""
        from preflight.host import Measured
        from preflight.measure import SECONDS, Wish, measure

        # A trial at the planned scale needs a plan: without one nothing is asked of the pins.
        pin = what.needs.pinned_bytes if what.plan is not None else None
        with render.Progress("measuring links, pins and disk", SECONDS):
            found = measure(Wish(model, pin, settings.engine_python))
        self.real = self.real.model_copy(update={"measured": found})
        if self.recording is None:
            self.host = self.real
            return
        found = Measured.model_validate_json(self.recording.blank.text(found.model_dump_json()))
        self.recording.measured = found.model_dump(mode="json")
        self.host = self.host.model_copy(update={"measured": found})

    def save(self) -> None:
        if self.recording is not None:
            self.recording.save()


@dataclass(frozen=True)
class Wanted:
    """What the machine is judged by: a plan, or a profile where there is none.

    `refusal` says why the model cannot be planned on this machine.
    """

    needs: Needs
    plan: Plan | None = None
    refusal: ApplianceError | None = None


def wanted(
    host: Host,
    model: Path | None,
    plan_path: Path | None,
    gpus: int | None,
    settings: Settings,
    kept: Files | None = None,
) -> Wanted:
    """From the model planned on this machine, else from the plan given, else from the profile.

    `kept`: where rates measured earlier may lie, for a plan like that of `up`.
    """
    from appliance.plan.model import load_plan
    from preflight import profile

    if model is None and plan_path is not None:
        plan = load_plan(plan_path)
        return Wanted(needs_of(plan, settings), plan)
    cpu = gpus == 0 or (gpus is None and settings.device == "cpu")
    before = profile(
        gpus=gpus or settings.tensor_parallel or 1,
        device="cpu" if cpu else "cuda",
        deployment=settings.deployment,
        host_bytes=0 if cpu else None,
    )
    if model is None:
        return Wanted(before)

    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.plan.planner import plan as make_plan
    from appliance.serve.measured import with_kept_rates

    checkpoint = read_checkpoint(model.absolute())
    measured = host if kept is None else with_kept_rates(host, kept)
    try:
        made = make_plan(measured, checkpoint, None, policy(gpus, settings))
    except UsageError:
        raise
    except ApplianceError as refusal:
        return Wanted(before, refusal=refusal)
    return Wanted(needs_of(made, settings), made)


def policy(gpus: int | None, settings: Settings) -> Policy:
    """What a container's plan step asks of the planner; `gpus` wins over the settings."""
    from appliance.cli import options

    return options.policy(
        device="cpu" if gpus == 0 else settings.device,
        streams=settings.streams,
        context_tokens=settings.context_tokens,
        tensor_parallel=gpus or settings.tensor_parallel,
        host_share=settings.host_share,
    )


def needs_of(plan: Plan, settings: Settings, huge_page_bytes: int | None = None) -> Needs:
    from preflight import plan_needs

    facts = plan.model_dump(mode="json")
    return plan_needs(facts, deployment=settings.deployment, huge_page_bytes=huge_page_bytes)


def judged(host: Host, what: Wanted, ignore: Collection[str]) -> Report:
    """The checks' findings and those of a plan: of its guard rails, or that there can be none.

    So what `up` would refuse is a failed check here.

    Raises UsageError for an id in `ignore` that is neither's.
    """
    from appliance.plan.guards import guard
    from appliance.serve.prepare import GUARD_IDS
    from preflight import check
    from preflight.report import UnknownCheck

    try:
        report = check(host, what.needs, set(ignore) - GUARD_IDS)
    except UnknownCheck as error:
        raise UsageError(str(error)) from error
    if what.refusal is not None:
        return _with(report, [_unplannable(what.refusal)], 1)
    if what.plan is None:
        return report
    rails = [
        found.model_copy(update={"severity": "warn", "ignored": True})
        if found.severity == "fail" and found.check in ignore
        else found
        for found in guard(what.plan, host)
    ]
    return _with(report, rails, len(GUARD_IDS))


def _unplannable(refusal: ApplianceError) -> Finding:
    from preflight import Finding

    return Finding(
        check="model-cannot-be-planned",
        area="plan",
        severity="fail",
        saw=refusal.message,
        threshold="a home for every expert",
        source="the planner, as `up` asks it",
        fix=refusal.fix,
    )


def _with(report: Report, more: Sequence[Finding], checks: int) -> Report:
    """A report of so many further checks, worst first."""
    from preflight.report import ORDER

    findings = sorted((*report.findings, *more), key=lambda found: ORDER[found.severity])
    run = report.checks_run + checks
    return report.model_copy(update={"findings": tuple(findings), "checks_run": run})


def pinning_lines(plan: Plan) -> Iterator[str]:
    """What the launcher binds of each rank before it allocates anything."""
    for rank in plan.ranks:
        cpus = "any CPU" if rank.cpus is None else f"CPUs {rank.cpus}"
        node = "any memory node" if rank.numa_node is None else f"memory node {rank.numa_node}"
        held = render.size(sum(line.size_bytes for line in rank.ledger if line.pinned))
        locked = f"{held} {'pinned' if rank.device == 'cuda' else 'of experts'} there"
        yield f"rank {rank.rank}: {rank.gpu or 'no GPU'}, {cpus}, {node}, {locked}"


def folders(settings: Settings, model: Path | None) -> dict[str, str]:
    """Whose disks are looked at, by role; docker's own folder is found by asking docker."""
    places = {"temporary": Path("/tmp"), "cache": settings.state_dir}
    if model is not None:
        places["model"] = model
    return {role: str(_there(path)) for role, path in places.items()}


def _there(path: Path) -> Path:
    """The folder, or the nearest one above it where it would be made."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path.resolve()
