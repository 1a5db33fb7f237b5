"""An appliance on this host: start it detached, ask it, read its log, stop it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from appliance import process
from appliance.errors import ServeError
from appliance.serve import before
from appliance.serve.client import Client
from appliance.serve.keys import first_key
from appliance.serve.log import cause, tail
from appliance.serve.spec import ServeSpec
from appliance.serve.state import (
    ENDED,
    SERVING,
    Files,
    State,
    already_running,
    make_folder,
    read_state,
    write_state,
)

TICK_SECONDS = 0.2
ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Status:
    """The state file, corrected by what is really there; None where a question got no answer."""

    state: State
    engine: Any | None = None  # GET /appliance/state: ranks with homes, picks, bytes read
    gateway: Any | None = None  # GET /gateway/state: admitted, draining, in_flight

    @property
    def is_serving(self) -> bool:
        return self.state.phase in SERVING and self.gateway is not None

    def as_json(self) -> dict[str, Any]:
        """`serving`, the state file's fields, `engine` and `gateway`; null: no answer."""
        state = self.state.model_dump(mode="json")
        return {"serving": self.is_serving, **state, "engine": self.engine, "gateway": self.gateway}


def detach(
    argv: Sequence[str],
    spec: ServeSpec,
    inherited: Mapping[str, str],
    observe: Callable[[State], None],
) -> State:
    """Start argv, a supervisor of `spec`, in a session of its own and wait until it serves.

    Raises ServeError with the supervisor's reason where it does not come to that.
    """
    files = spec.files
    make_folder(files)
    running = read_state(files)
    if running is not None and running.supervisor_is_running:
        raise already_running(files)
    before.require(spec)
    files.supervisor_log.unlink(missing_ok=True)
    try:
        child = process.spawn(argv, environment=inherited, log=files.supervisor_log)
    except OSError as error:
        raise ServeError(f"cannot start the supervisor: {error.strerror}") from error
    while True:
        code = child.poll()  # before the state is read: what it wrote last is seen
        state = read_state(files)
        if state is not None and state.supervisor_pid == child.pid:
            observe(state)
            if state.phase in SERVING:
                return state
            if state.phase == "failed":
                child.wait()
                raise ServeError(state.message or "the start failed", fix=state.fix)
        if code is not None:
            words = tail(files.supervisor_log, 2)
            raise ServeError(" ".join(words) or f"the supervisor exited with status {code}")
        time.sleep(TICK_SECONDS)


def status(files: Files, answer_seconds: float = ANSWER_SECONDS) -> Status | None:
    """What runs from this state directory; None where nothing ever did.

    `answer_seconds`: how long each of two questions waits for the engine.
    """
    state = read_state(files)
    if state is None:
        return None
    if state.phase in ENDED:
        return Status(state)
    if not state.supervisor_is_running:
        return Status(state.model_copy(update={"phase": "failed", "message": _orphaned(state)}))
    if state.phase in ("starting", "proving"):
        return Status(state)
    key = first_key(files.control_key)
    client = Client(state.host, state.port, key, state.certificate, answer_seconds)
    return Status(state, _ask(client, "/appliance/state"), _ask(client, "/gateway/state"))


def stop(files: Files, observe: Callable[[State], None], limit_seconds: float) -> State | None:
    """Ask the supervisor to drain and end, wait for it; end an engine it left behind.

    None where nothing ran. Raises ServeError where it still runs after `limit_seconds`.
    """
    state = read_state(files)
    if state is None:
        return None
    if not state.supervisor_is_running:
        return _end_orphan(files, state)
    with contextlib.suppress(ProcessLookupError):  # it ended just now
        os.kill(state.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + limit_seconds
    while state.supervisor_is_running:
        if time.monotonic() > deadline:
            raise ServeError(
                f"the supervisor (process {state.supervisor_pid}) still runs after"
                f" {limit_seconds:.0f} s",
                fix="run `appliance down` again: a second signal does not wait for requests",
            )
        observe(read_state(files) or state)
        time.sleep(TICK_SECONDS)
    return read_state(files)


def log_lines(path: Path, lines: int, *, follow: Callable[[], bool]) -> Iterator[str]:
    """The last lines of a log, then new ones as they come for as long as `follow()` says so.

    Also those of the file that takes this one's place: an engine that is started again has its own.
    """
    if not path.exists():
        raise ServeError(f"there is no log at {path}", fix="start one with `appliance up`")
    file, rest = path.open("rb"), b""
    try:
        file.seek(0, os.SEEK_END)
        yield from tail(path, lines)
        while follow():
            rest += file.read()
            *whole, rest = rest.split(b"\n")
            yield from (line.decode("utf-8", errors="replace") for line in whole)
            if whole:
                continue
            if _is_another(path, file):
                file.close()
                file, rest = path.open("rb"), b""
            time.sleep(TICK_SECONDS)
    finally:
        file.close()


def _is_another(path: Path, file: BinaryIO) -> bool:
    try:
        now, followed = path.stat(), os.fstat(file.fileno())
    except FileNotFoundError:
        return False  # between the old log's new name and the new log
    return (now.st_dev, now.st_ino) != (followed.st_dev, followed.st_ino)


def _orphaned(state: State) -> str:
    words = f"the supervisor (process {state.supervisor_pid}) is gone without a word"
    if state.engine_is_running:
        return f"{words}; its engine (process {state.engine_pid}) still runs: `appliance down`"
    reason = cause(state.log)
    return f"{words}; last error in the log: {reason}" if reason else words


def _end_orphan(files: Files, state: State) -> State | None:
    if state.phase in ENDED:
        return None
    if state.engine_pid is not None and state.engine_identity is not None:
        process.end(state.engine_pid, state.engine_identity, patience_seconds=20.0)
    words = "the supervisor was gone; what it had left behind was ended"
    ended = state.model_copy(update={"phase": "stopped", "since": time.time(), "message": words})
    write_state(files, ended)
    return ended


def _ask(client: Client, path: str) -> Any | None:
    try:
        return client.get(path)
    except ServeError:
        return None
