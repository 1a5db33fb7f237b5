"""The state directory of one appliance, and the state file in it that everybody reads."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance import durable, process
from appliance.errors import ServeError

Phase = Literal[
    "starting", "proving", "ready", "unproved", "draining", "stopping", "stopped", "failed"
]
SERVING: tuple[Phase, ...] = ("ready", "unproved")
ENDED: tuple[Phase, ...] = ("stopped", "failed")


@dataclass(frozen=True)
class Files:
    """Where everything of one appliance is."""

    folder: Path
    keys: Path

    @classmethod
    def of(cls, folder: Path, keys: Path | None = None) -> Files:
        folder = folder.absolute()
        return cls(folder=folder, keys=keys.absolute() if keys else folder / "keys")

    @property
    def state(self) -> Path:
        return self.folder / "state.json"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.json"

    @property
    def asked(self) -> Path:
        """How what served last was asked for: asked.py."""
        return self.folder / "asked.json"

    @property
    def rates(self) -> Path:
        return self.folder / "rates.json"

    def learned(self, checkpoint_digest: str) -> Path:
        """Recent picks of the experts of one checkpoint, as the engine's slots weigh them."""
        return self.folder / f"learned-{checkpoint_digest[:12]}.json"

    @property
    def start_lock(self) -> Path:
        return self.folder / "start.lock"

    @property
    def control_key(self) -> Path:
        return self.folder / "control-key"

    @property
    def certificate(self) -> Path:
        """The one that is made here, where APPLIANCE_TLS is generated."""
        return self.folder / "tls.crt"

    @property
    def certificate_key(self) -> Path:
        return self.folder / "tls.key"

    @property
    def engine_log(self) -> Path:
        return self.folder / "engine.log"

    @property
    def supervisor_log(self) -> Path:
        return self.folder / "supervisor.log"


class State(BaseModel):
    """One appliance now. Times are seconds since 1970; identities as process.identity gives."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    phase: Phase
    since: float
    supervisor_pid: int
    supervisor_identity: str
    engine_pid: int | None = None
    engine_identity: str | None = None
    host: str
    port: int
    model: Path
    served_name: str
    plan: Path
    plan_digest: str
    log: Path
    keys: Path
    expected_load_seconds: float
    ready_after_seconds: float | None = None
    message: str | None = None
    fix: str | None = None
    certificate: Path | None = None

    @property
    def supervisor_is_running(self) -> bool:
        return process.is_running(self.supervisor_pid, self.supervisor_identity)

    @property
    def engine_is_running(self) -> bool:
        if self.engine_pid is None or self.engine_identity is None:
            return False
        return process.is_running(self.engine_pid, self.engine_identity)

    @property
    def words(self) -> str:
        """The phase for people."""
        return "serving, answers unproved" if self.phase == "unproved" else self.phase

    @property
    def url(self) -> str:
        """Where clients on this host reach it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "http" if self.certificate is None else "https"
        shown = f"[{host}]" if ":" in host else host
        return f"{scheme}://{shown}:{self.port}"

    @property
    def seconds(self) -> float:
        """How long it has been in this phase."""
        return max(0.0, time.time() - self.since)


def read_state(files: Files) -> State | None:
    """The last state written, None where there never was one. Raises ServeError if unreadable."""
    try:
        return State.model_validate_json(files.state.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        holder = _holder(files.lock)
        if holder is None:
            fix = (
                "nobody holds the lock beside it, so no appliance runs from here: remove that file"
            )
        else:
            fix = f"an appliance runs from here: `kill {holder}` stops it; then remove that file"
        raise ServeError(f"cannot make sense of the state file {files.state}", fix=fix) from error


def _holder(lock: Path) -> int | None:
    """The process that holds a lock; None where none does. Source: /proc/locks."""
    try:
        inode = str(lock.stat().st_ino)
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    rows = [line.split() for line in lines if "FLOCK" in line and "->" not in line]
    return next((int(row[4]) for row in rows if row[5].rpartition(":")[2] == inode), None)


def write_state(files: Files, state: State) -> None:
    write_aside(files.state, json.dumps(state.model_dump(mode="json"), indent=1) + "\n")


def write_aside(path: Path, text: str) -> None:
    """Mode 0600, all of it or what was there before. Raises ServeError with the system's reason."""
    try:
        durable.write_file(path, text.encode(), mode=durable.OWNER_ONLY)
    except OSError as error:
        raise ServeError(f"cannot write {path}: {error.strerror}") from error


def make_folder(files: Files) -> None:
    """The state directory, closed to other users. Raises ServeError with the system's reason."""
    try:
        files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServeError(
            f"cannot make the state directory {files.folder}: {error.strerror}",
            fix="set APPLIANCE_STATE_DIR to a directory you may write",
        ) from error


@contextmanager
def only_supervisor(files: Files) -> Iterator[None]:
    """Hold the state directory's lock: the kernel drops it when the supervisor ends, however."""
    with held_lock(files.lock) as held:
        if not held:
            raise already_running(files)
        yield


@contextmanager
def only_start(files: Files) -> Iterator[None]:
    """From before the plan is written until it serves: two starts would write over one another's.

    Makes the state directory. Raises ServeError where another start is under way.
    """
    make_folder(files)
    with held_lock(files.start_lock) as held:
        if not held:
            state = read_state(files)
            if state is not None and state.supervisor_is_running:
                raise already_running(files)
            raise ServeError(
                f"another start from {files.folder} is under way",
                fix="`appliance status` shows it, `appliance down` ends it",
            )
        yield


@contextmanager
def held_lock(path: Path) -> Iterator[bool]:
    """Whether the lock could be had; the kernel drops it with the process, however that ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def already_running(files: Files) -> ServeError:
    state = read_state(files)
    what = (
        "an appliance" if state is None else f"{state.served_name} (process {state.supervisor_pid})"
    )
    where = "" if state is None else f" on port {state.port}"
    return ServeError(
        f"{what} already runs from {files.folder}{where}",
        fix="stop it with `appliance down`, or set APPLIANCE_STATE_DIR to run another one",
    )
