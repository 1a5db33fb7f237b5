"""What is deployed, what is under way and what was: one file, replaced as a whole.

One file on purpose: that an upgrade is over and what is deployed now become true together.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance.errors import ServeError, UsageError
from appliance.serve.state import write_aside

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

    @property
    def last_good(self) -> Deployment | None:
        """What was served before the current one."""
        for upgrade in reversed(self.past):
            if upgrade.outcome == "committed" and upgrade.target == self.current:
                return upgrade.previous
        return None


def changes(current: Deployment, target: Deployment) -> dict[str, str]:
    """What differs, field by field, as `old -> new`; the plan by its digest, not by its path."""
    fields = [name for name in Deployment.model_fields if name != "plan"]
    pairs = {name: (getattr(current, name), getattr(target, name)) for name in fields}
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
    try:
        descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError as error:
        raise UsageError(f"nothing is deployed: there is no {path.parent}",
                         fix="appliance up first") from error  # fmt: skip
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UsageError("another upgrade is running", fix="wait for it to end") from error
    finally:
        os.close(descriptor)
