"""STEPS: what an upgrade does, in order, and how each is undone. Every one may be run twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from appliance.upgrade.book import Deployment


class World(Protocol):
    """Where deployments run: this host, Docker, Kubernetes. All calls may be repeated."""

    def served(self) -> Deployment:
        """What runs now, as a deployment. Raises UsageError where nothing does."""

    def is_what_serves(self, recorded: Deployment) -> bool:
        """False where somebody started another one by hand since; True where nothing serves."""

    def pull(self, target: Deployment) -> None:
        """Image and weights are here; nothing that serves is touched."""

    def verify(self, target: Deployment) -> None:
        """They are what they should be: digests, headers, signatures where configured."""

    def preflight(self, target: Deployment) -> None:
        """The machine is good enough for it, as far as can be seen while the old one serves."""

    def plan(self, target: Deployment) -> Deployment:
        """The deployment with its plan."""

    def migrate(self, version: int, knows: Deployment) -> None:
        """The files of the state directory are of that schema; `knows` knows the way there."""

    def drain(self) -> None:
        """New requests are refused; accepted ones have finished."""

    def stop(self) -> None:
        """Nothing runs."""

    def start(self, deployment: Deployment) -> None:
        """It runs and is ready by proof."""

    def prove(self, deployment: Deployment) -> None:
        """It answers as it must, seen from outside."""

    def serves(self, deployment: Deployment) -> bool:
        """It runs, and takes requests or can be told to at once (`admit`)."""

    def admit(self) -> None:
        """What was drained takes requests again."""

    def recorded(self, deployment: Deployment) -> Deployment:
        """The deployment that serves now, with what only its start could tell: digests."""


class Proof(Protocol):
    """What must not get worse. Both may be repeated; what was measured before is kept in files."""

    def before(self) -> None:
        """Measure the deployment that serves now."""

    def after(self) -> None:
        """Measure the new one. Raises CheckFailed with the numbers where it is worse."""


@dataclass
class Work:
    """What the steps act on; `target` gains its plan on the way."""

    world: World
    previous: Deployment
    target: Deployment
    proofs: Sequence[Proof] = ()


def _plan(work: Work) -> None:
    work.target = work.world.plan(work.target)


def _measure(work: Work) -> None:
    for proof in work.proofs:
        proof.before()


def _prove(work: Work) -> None:
    work.world.prove(work.target)
    for proof in work.proofs:
        proof.after()


def _record(work: Work) -> None:
    work.target = work.world.recorded(work.target)


def serve_previous(work: Work) -> None:
    """The end of every undoing: also where the machine lost power while the old one served."""
    if work.world.serves(work.previous):
        work.world.admit()
    else:
        work.world.stop()
        work.world.start(work.previous)


def _nothing(work: Work) -> None:
    """What it did hurts nobody: a pulled image, a plan beside the old one."""


@dataclass(frozen=True)
class Step:
    name: str
    run: Callable[[Work], None]
    undo: Callable[[Work], None] = _nothing


STEPS = (
    Step("pull", lambda work: work.world.pull(work.target)),
    Step("verify", lambda work: work.world.verify(work.target)),
    Step("preflight", lambda work: work.world.preflight(work.target)),
    Step("plan", _plan),
    Step("measure", _measure),
    Step("drain", lambda work: work.world.drain()),
    Step("stop", lambda work: work.world.stop()),
    Step(
        "migrate",
        lambda work: work.world.migrate(work.target.schema_version, work.target),
        lambda work: work.world.migrate(work.previous.schema_version, work.target),
    ),
    Step("switch", lambda work: work.world.start(work.target), lambda work: work.world.stop()),
    Step("prove", _prove),
    # Committing is the write of the book that follows: see run.py.
    Step("commit", _record),
)
NAMES = tuple(step.name for step in STEPS)
