"""One run of the engine: its state, told at every change, and waiting that notices a death."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from appliance import process
from appliance.errors import ServeError
from appliance.serve import log
from appliance.serve.spec import ServeSpec
from appliance.serve.state import SERVING, Phase, State, write_state

TICK_SECONDS = 0.2
REWRITE_SECONDS = 5.0
# An engine that answers people is not ended because of the file that says so.
GOES_ON_UNWRITTEN: tuple[Phase, ...] = (*SERVING, "draining", "stopping")
T = TypeVar("T")


@dataclass
class StopRequest:
    """Set by a signal: once to drain, twice to hurry. `number` is the first signal's."""

    count: int = 0
    number: int | None = None

    def ask(self, number: int | None = None, *_: object) -> None:
        self.number = number if self.count == 0 else self.number
        self.count += 1


class Stopped(Exception):
    """Somebody asked to stop before the engine was ready."""


@dataclass
class Run:
    spec: ServeSpec
    stop: StopRequest
    observe: Callable[[State], None]
    state: State
    child: subprocess.Popen[bytes] | None = None
    started: float = field(default_factory=time.monotonic)
    note: str | None = None  # written by the thread that proves, told by the one that ticks
    unwritten_at: float | None = None  # when the state file was last found unwritable

    def become(self, phase: Phase, message: str | None = None, **changes: object) -> None:
        """Raises ServeError where the state cannot be written; not once requests are taken."""
        since = self.state.since if phase == self.state.phase else time.time()
        update = {"phase": phase, "since": since, "message": message, **changes}
        self.state = self.state.model_copy(update=update)
        self._write()
        self.observe(self.state)

    def _write(self) -> None:
        try:
            write_state(self.spec.files, self.state)
        except ServeError:
            if self.state.phase not in GOES_ON_UNWRITTEN:
                raise
            self.unwritten_at = time.monotonic()
        else:
            self.unwritten_at = None

    def tick(self) -> None:
        """Between polls: raises ServeError where the engine has died, Stopped where asked to."""
        code = self.child.poll() if self.child else None
        if code is not None:
            reason = log.cause(self.spec.files.engine_log)
            why = f": {reason}" if reason else ""
            doing = "serving" if self.state.phase in SERVING else self.state.phase
            raise ServeError(
                f"the engine {log.exit_words(code)} while {doing}{why}",
                fix=f"read the whole log: {self.spec.files.engine_log}",
            )
        if self.stop.count:
            raise Stopped
        if self.note is not None and self.note != self.state.message:
            self.become(self.state.phase, self.note)
        if self.unwritten_at is not None and time.monotonic() - self.unwritten_at > REWRITE_SECONDS:
            self._write()
        self.observe(self.state)
        time.sleep(TICK_SECONDS)

    def during(self, call: Callable[[], T]) -> T:
        """The result of a slow call, ticking meanwhile; left behind where a tick raises."""
        results: queue.Queue[tuple[bool, object]] = queue.Queue()

        def work() -> None:
            try:
                results.put((True, call()))
            except BaseException as error:  # noqa: BLE001 (handed to the waiting thread)
                results.put((False, error))

        threading.Thread(target=work, daemon=True).start()
        while results.empty():
            self.tick()
        done, value = results.get()
        if not done:
            self.tick()  # where the engine died, that is the reason
            raise value  # type: ignore[misc]
        return value  # type: ignore[return-value]


def first_state(spec: ServeSpec) -> State:
    pid = os.getpid()
    return State(
        phase="starting",
        since=time.time(),
        supervisor_pid=pid,
        supervisor_identity=process.identity(pid) or "",
        host=spec.host,
        port=spec.port,
        model=spec.model,
        served_name=spec.served_name,
        plan=spec.plan_path,
        plan_digest=spec.plan_digest,
        log=spec.files.engine_log,
        keys=spec.files.keys,
        expected_load_seconds=spec.load_seconds,
        certificate=spec.certificate,
    )
