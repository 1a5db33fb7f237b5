"""What is deployed, what is under way and what was: one file, replaced as a whole.

One file on purpose: that an upgrade is over and what is deployed now become true together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance.errors import ServeError, UsageError
from appliance.serve.asked import Asked
from appliance.serve.state import held_lock, write_aside

BOOK = "deployments.json"
KEPT = 50  # upgrades remembered


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Deployment(Strict):
    """All that decides what is served. Two equal ones serve the same."""

    release: str
    image: str | None = None
    image_digest: str | None = None
    image_signature: str | None = None  # minisign's, as text
    model: Path
    plan: Path | None = None
    plan_digest: str | None = None
    settings: dict[str, str] = {}
    schema_version: int = 1  # of the files in the state directory
    asked: Asked | None = None  # on this host: how `up` was asked for what serves


class Upgrade(Strict):
    """One upgrade: the step it is at, whether that step is done, whether it is being undone."""

    previous: Deployment
    target: Deployment
    step: str
    done: bool = False
    undoing: bool = False
    started: float
    ended: float | None = None
    outcome: Literal["running", "committed", "undone"] = "running"
    reason: str | None = None
    proofs: tuple[str, ...] = ()  # what is measured before and after, besides the canary


class Book(Strict):
    """`current` is what is served whenever nothing is under way."""

    format: Literal[1] = 1
    current: Deployment | None = None
    running: Upgrade | None = None
    past: tuple[Upgrade, ...] = ()

    def closed(self, upgrade: Upgrade) -> Book:
        """The upgrade is over: its outcome says what is current from now on."""
        served = upgrade.target if upgrade.outcome == "committed" else upgrade.previous
        past = (*self.past, upgrade)[-KEPT:]
        return Book(current=served, running=None, past=past)

    def started_by_hand(self, deployment: Deployment) -> Book:
        """Somebody started that in place of what is recorded: going back leads to what was."""
        if self.current is None:
            return self.model_copy(update={"current": deployment})
        now = time.time()
        return self.closed(Upgrade(
            previous=self.current, target=deployment, step="commit", done=True, started=now,
            ended=now, outcome="committed", reason="started by hand",
        ))  # fmt: skip

    @property
    def last_good(self) -> Deployment | None:
        """What was served before the current one."""
        for upgrade in reversed(self.past):
            if upgrade.outcome == "committed" and upgrade.target == self.current:
                return upgrade.previous
        return None


def changes(current: Deployment, target: Deployment) -> dict[str, str]:
    """What differs, field by field, as `old -> new`; the plan by its digest, not by its path."""
    fields = [name for name in Deployment.model_fields if name not in ("plan", "asked")]
    pairs = {name: (getattr(current, name), getattr(target, name)) for name in fields}
    if current.asked is not None and target.asked is not None:
        for name in Asked.model_fields:
            pairs[name] = getattr(current.asked, name), getattr(target.asked, name)
        names = [
            (one.asked and one.asked.served_name) or one.model.name for one in (current, target)
        ]
        pairs["served_name"] = names[0], names[1]
    return {name: f"{old} -> {new}" for name, (old, new) in pairs.items() if old != new}


def read_book(path: Path) -> Book:
    """An empty book where there is none. Raises ServeError where it cannot be understood."""
    try:
        return Book.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Book()
    except (OSError, ValidationError) as error:
        raise ServeError(
            f"cannot make sense of the record of deployments {path}",
            fix="it was written by a newer release, or by hand: put back a copy",
        ) from error


def write_book(path: Path, book: Book) -> None:
    write_aside(path, json.dumps(book.model_dump(mode="json"), indent=1) + "\n")


@contextmanager
def only_upgrade(path: Path) -> Iterator[None]:
    """Hold the lock beside the book; the kernel drops it when the process ends, however."""
    if not path.parent.is_dir():
        raise UsageError(
            f"nothing is deployed: there is no {path.parent}", fix="appliance up first"
        )
    with held_lock(path.with_suffix(".lock")) as held:
        if not held:
            raise UsageError("another upgrade is running", fix="wait for it to end")
        yield
