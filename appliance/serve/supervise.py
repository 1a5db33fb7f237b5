"""The supervisor: starts the engine, waits, has it proved, watches it, drains it. One process."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from appliance import process
from appliance.errors import ServeError
from appliance.serve import before, log
from appliance.serve.client import Client
from appliance.serve.keys import first_key, make_keys
from appliance.serve.proof import Expectation, Proof, prove, read_expectations
from appliance.serve.spec import REMOVED_VARIABLES, ServeSpec
from appliance.serve.state import (
    Phase,
    State,
    make_folder,
    only_supervisor,
    write_state,
)

TICK_SECONDS = 0.2
END_SECONDS = 20.0  # from SIGTERM to SIGKILL, when nothing is in flight any more
T = TypeVar("T")


@dataclass
class StopRequest:
    """Set by a signal: once to drain, twice to hurry."""

    count: int = 0

    def ask(self, *_: object) -> None:
        self.count += 1


class _Stopped(Exception):
    """Somebody asked to stop before the engine was ready."""


@dataclass
class _Run:
    spec: ServeSpec
    stop: StopRequest
    observe: Callable[[State], None]
    state: State
    child: subprocess.Popen[bytes] | None = None
    started: float = field(default_factory=time.monotonic)
    note: str | None = None  # written by the thread that proves, told by the one that ticks

    def become(self, phase: Phase, message: str | None = None, **changes: object) -> None:
        since = self.state.since if phase == self.state.phase else time.time()
        update = {"phase": phase, "since": since, "message": message, **changes}
        self.state = self.state.model_copy(update=update)
        write_state(self.spec.files, self.state)
        self.observe(self.state)

    def tick(self) -> None:
        """Between polls: raises ServeError where the engine has died, _Stopped where asked to."""
        code = self.child.poll() if self.child else None
        if code is not None:
            reason = log.cause(self.spec.files.engine_log)
            why = f": {reason}" if reason else ""
            raise ServeError(
                f"the engine {log.exit_words(code)} while {self.state.phase}{why}",
                fix=f"read the whole log: {self.spec.files.engine_log}",
            )
        if self.stop.count:
            raise _Stopped
        if self.note is not None and self.note != self.state.message:
            self.become(self.state.phase, self.note)
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


def supervise(
    spec: ServeSpec,
    inherited: Mapping[str, str],
    observe: Callable[[State], None],
    stop: StopRequest,
) -> State:
    """Serve until stopped; the last state comes back.

    `observe` gets the state at every change and several times a second. Raises ServeError where
    the engine does not start, does not prove itself, or dies; the engine is gone by then.
    """
    make_folder(spec.files)
    with only_supervisor(spec.files):
        expectations = read_expectations(spec.model)
        before.require_program(spec.argv[0])
        before.require_disk(spec.files.folder)
        before.require_free_port(spec.host, spec.port)
        make_keys(spec.files)
        run = _Run(spec, stop, observe, _first_state(spec))
        failure: BaseException | None = None
        try:
            _serve(run, inherited, expectations)
        except _Stopped:
            _drain(run)
        except BaseException as error:
            failure = error
            raise
        finally:
            _end(run)
            _last_word(run, failure)
        return run.state


def _serve(
    run: _Run, inherited: Mapping[str, str], expectations: tuple[Expectation, ...] | None
) -> NoReturn:
    spec = run.spec
    _start(run, inherited)
    client = Client(spec.host, spec.port, first_key(spec.files.control_key))
    _wait_healthy(run, client)
    run.become("proving")

    def tell(words: str) -> None:
        run.note = words

    proof = run.during(lambda: prove(client, spec.served_name, expectations, tell))
    run.note = None
    client.post("/gateway/admit")
    _admitted(run, proof)
    while True:
        run.tick()


def _first_state(spec: ServeSpec) -> State:
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
    )


def _start(run: _Run, inherited: Mapping[str, str]) -> None:
    engine_log = run.spec.files.engine_log
    if engine_log.exists():
        engine_log.replace(engine_log.with_suffix(".previous.log"))
    environment = {k: v for k, v in inherited.items() if k not in REMOVED_VARIABLES}
    try:
        run.child = process.spawn(
            run.spec.argv,
            environment={**environment, **run.spec.environment},
            log=engine_log,
            folder=run.spec.files.folder,
        )
    except OSError as error:
        raise ServeError(f"cannot start {run.spec.argv[0]}: {error.strerror}") from error
    pid = run.child.pid
    run.become("starting", engine_pid=pid, engine_identity=process.identity(pid))


def _wait_healthy(run: _Run, client: Client) -> None:
    while not client.is_healthy():
        if time.monotonic() - run.started > run.spec.start_limit_seconds:
            raise ServeError(
                f"the engine was not healthy after {run.spec.start_limit_seconds:.0f} s"
                f" (expected about {run.spec.load_seconds:.0f} s)",
                fix=f"read {run.spec.files.engine_log}, or raise APPLIANCE_START_LIMIT_SECONDS",
            )
        run.tick()


def _admitted(run: _Run, proof: Proof) -> None:
    seconds = round(time.monotonic() - run.started, 1)
    placed = f"{proof.samples} sampled experts on {proof.ranks} rank(s) agree with the checkpoint"
    if proof.answers is None:
        words = f"serving, answers unproved: the checkpoint ships no known answers; {placed}"
        run.become("unproved", words, ready_after_seconds=seconds)
    else:
        words = f"{placed}; {proof.answers} known answers are right"
        run.become("ready", words, ready_after_seconds=seconds)


def _drain(run: _Run) -> None:
    """Let accepted requests finish, no longer than the drain limit or a second signal."""
    if run.state.phase not in ("ready", "unproved"):
        run.become("draining", "stopped before it was ready")
        return
    client = Client(run.spec.host, run.spec.port, first_key(run.spec.files.control_key))
    deadline = time.monotonic() + run.spec.drain_seconds
    in_flight = None
    try:
        in_flight = client.post("/gateway/drain")["in_flight"]
        run.become("draining", f"{in_flight} requests in flight")
        while in_flight and time.monotonic() < deadline and run.stop.count < 2:
            time.sleep(TICK_SECONDS)
            in_flight = client.get("/gateway/state")["in_flight"]
            run.observe(run.state)
    except ServeError as error:
        run.become("draining", f"the engine did not say what is in flight: {error.message}")
        return
    words = "every accepted request finished"
    if in_flight:
        words = f"{in_flight} requests were cut after {run.spec.drain_seconds:.0f} s"
        if run.stop.count > 1:
            words = f"{in_flight} requests were cut: asked to stop at once"
    run.become("draining", words)


def _end(run: _Run) -> None:
    if run.child is None:
        return
    identity = run.state.engine_identity
    if identity is not None:
        patience = 1.0 if run.stop.count > 1 else END_SECONDS
        process.end(run.child.pid, identity, patience)
    run.child.wait()


def _last_word(run: _Run, failure: BaseException | None) -> None:
    # A full disk must not hide why the engine ended.
    with contextlib.suppress(ServeError):
        if failure is None:
            run.become("stopped", run.state.message)
        elif isinstance(failure, ServeError):
            run.become("failed", failure.message, fix=failure.fix)
        else:
            run.become("failed", f"{type(failure).__name__}: {failure}")
