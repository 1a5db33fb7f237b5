"""Carry an upgrade out, undo one that failed, take up one that was cut off."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import ApplianceError, ServeError, UsageError
from appliance.upgrade.book import (
    BOOK,
    Book,
    Deployment,
    Upgrade,
    only_upgrade,
    read_book,
    write_book,
)
from appliance.upgrade.steps import NAMES, STEPS, Proof, Work, World, serve_previous

UNDO_TRIES = 3


@dataclass
class Runner:
    """One state directory and the world its deployments run in."""

    world: World
    folder: Path
    tell: Callable[[str], None] = lambda words: None
    # (what is to be proved, when the upgrade began) -> how
    prover: Callable[[str, float], Proof] | None = None

    @property
    def path(self) -> Path:
        return self.folder / BOOK

    def adopt(self, deployment: Deployment) -> None:
        """Record what already serves as the first deployment."""
        with only_upgrade(self.path):
            book = read_book(self.path)
            if book.current is not None:
                raise UsageError(f"release {book.current.release} is already recorded here")
            write_book(self.path, Book(current=deployment))

    def upgrade(self, target: Deployment, proofs: Sequence[str] = ()) -> Upgrade:
        """To `target`, or back to what was served, whatever fails. The outcome says which.

        `proofs`: what the prover is to measure before and after, besides the world's own proof.
        """
        with only_upgrade(self.path):
            book = read_book(self.path)
            if book.running is not None:
                raise UsageError(
                    f"the upgrade to {book.running.target.release} was cut off at"
                    f" {book.running.step}",
                    fix="appliance upgrade resume",
                )
            if book.current is None:
                raise UsageError("nothing is deployed yet", fix="appliance up first")
            if target == book.current:
                raise UsageError(f"release {target.release} is what is deployed")
            started = Upgrade(
                previous=book.current, target=target, step=NAMES[0], started=time.time(),
                proofs=tuple(proofs),
            )  # fmt: skip
            return self._forward(book, started)

    def resume(self) -> Upgrade | None:
        """Finish what a crash cut off: forwards, or backwards where it was being undone."""
        with only_upgrade(self.path):
            book = read_book(self.path)
            if book.running is None:
                return None
            self.tell(f"taking up the upgrade to {book.running.target.release}")
            if book.running.undoing:
                return self._undo(book, book.running)
            return self._forward(book, self._restarted(book.running))

    def _restarted(self, upgrade: Upgrade) -> Upgrade:
        """A power cut ends the engine, too: what was switched to is then switched to again."""
        switched = NAMES.index(upgrade.step) + upgrade.done > NAMES.index("switch")
        if switched and not self.world.serves(upgrade.target):
            return upgrade.model_copy(update={"step": "switch", "done": False})
        return upgrade

    def rollback(self) -> Upgrade:
        """To what was served before the current deployment, as an upgrade of its own."""
        last = read_book(self.path).last_good
        if last is None:
            raise UsageError("there is no earlier deployment to go back to")
        return self.upgrade(last)

    def _work(self, upgrade: Upgrade) -> Work:
        if upgrade.proofs and self.prover is None:
            raise UsageError("nothing here can measure before and after")
        proofs = [self.prover(one, upgrade.started) for one in upgrade.proofs if self.prover]
        return Work(self.world, upgrade.previous, upgrade.target, proofs)

    def _forward(self, book: Book, upgrade: Upgrade) -> Upgrade:
        work = self._work(upgrade)
        first = NAMES.index(upgrade.step) + upgrade.done
        try:
            for step in STEPS[first:]:
                upgrade = upgrade.model_copy(update={"step": step.name, "done": False})
                self._save(book, upgrade)
                self.tell(step.name)
                step.run(work)
                upgrade = upgrade.model_copy(update={"done": True, "target": work.target})
                self._save(book, upgrade)
            end = {"outcome": "committed", "ended": time.time()}
            upgrade = upgrade.model_copy(update=end)
            write_book(self.path, book.closed(upgrade))
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (the old one must serve)
            known = isinstance(error, ApplianceError | OSError)
            stopped = isinstance(error, KeyboardInterrupt)
            words = "interrupted" if stopped else error if known else repr(error)
            reason = f"{upgrade.step}: {words}"
            self.tell(f"{reason}; going back to {upgrade.previous.release}")
            failed = {"undoing": True, "reason": reason, "outcome": "running", "ended": None}
            return self._undo(book, upgrade.model_copy(update=failed))
        return upgrade

    def _undo(self, book: Book, upgrade: Upgrade) -> Upgrade:
        # On a full disk nothing can be recorded, and yet the old deployment must serve again:
        # what a crash then finds is the step before, which is safe to take up in either direction.
        work = self._work(upgrade)
        for step in reversed(STEPS[: NAMES.index(upgrade.step) + 1]):
            upgrade = upgrade.model_copy(update={"step": step.name})
            with contextlib.suppress(ServeError):
                self._save(book, upgrade)
            _insist(lambda undo=step.undo: undo(work))  # type: ignore[misc]
        _insist(lambda: serve_previous(work))
        end = {"outcome": "undone", "ended": time.time()}
        upgrade = upgrade.model_copy(update=end)
        write_book(self.path, book.closed(upgrade))
        return upgrade

    def _save(self, book: Book, upgrade: Upgrade) -> None:
        write_book(self.path, book.model_copy(update={"running": upgrade}))


def _insist(undo: Callable[[], None]) -> None:
    for attempt in range(UNDO_TRIES):
        try:
            return undo()
        except (ApplianceError, OSError):
            if attempt == UNDO_TRIES - 1:
                raise
            time.sleep(attempt)
    return None
