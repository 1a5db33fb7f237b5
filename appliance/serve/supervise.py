"""The supervisor: starts the engine, waits, has it proved, watches it, drains it. One process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from appliance import process
from appliance.errors import ServeError
from appliance.serve import before
from appliance.serve.answers import Expectation, read_expectations
from appliance.serve.asked import keep_asked
from appliance.serve.client import Client
from appliance.serve.keys import first_key, make_keys
from appliance.serve.learned import EVERY_SECONDS, keep_learned
from appliance.serve.proof import Proof, prove
from appliance.serve.run import TICK_SECONDS, Run, Stopped, StopRequest, first_state
from appliance.serve.spec import REMOVED_VARIABLES, ServeSpec
from appliance.serve.state import SERVING, State, make_folder, only_supervisor
from appliance.serve.tls import ready_certificate
from preflight.counted import counted

# From SIGTERM to SIGKILL: when nothing is in flight any more; when nobody waits for anything.
END_SECONDS = 30.0  # vLLM takes 17 s on a busy machine of two cores
HURRY_SECONDS = 2.0


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
        before.require(spec)
        make_keys(spec.files)
        ready_certificate(spec, make=spec.certificate == spec.files.certificate)
        run = Run(spec, stop, observe, first_state(spec))
        failure: BaseException | None = None
        patience = HURRY_SECONDS
        try:
            _serve(run, inherited, expectations)
        except Stopped:
            if run.state.phase not in SERVING:
                run.become("stopping", "stopped before it was ready")
            elif _drain(run):
                patience = END_SECONDS
        except BaseException as error:
            failure = error
            raise
        finally:
            _end(run, patience)
            _last_word(run, failure)
        return run.state


def _serve(
    run: Run, inherited: Mapping[str, str], expectations: tuple[Expectation, ...] | None
) -> NoReturn:
    spec = run.spec
    _start(run, inherited)
    client = Client(spec.host, spec.port, first_key(spec.files.control_key), spec.certificate)
    _wait_healthy(run, client)
    run.become("proving")

    def tell(words: str) -> None:
        run.note = words

    proof = run.during(lambda: prove(client, spec.served_name, expectations, spec.clear_lead, tell))
    run.note = None
    keep_asked(spec)
    client.post("/gateway/admit")
    _admitted(run, proof)
    kept = time.monotonic()
    while True:
        run.tick()
        if time.monotonic() - kept > EVERY_SECONDS:
            run.during(lambda: _keep_learned(run, client))
            kept = time.monotonic()


def _keep_learned(run: Run, client: Client) -> None:
    """The next start begins with it; an engine that serves is not ended because it cannot."""
    if run.spec.learned is None:
        return
    try:
        keep_learned(client, run.spec.learned)
    except ServeError as error:
        run.become(run.state.phase, f"what the cache learned was not kept: {error.message}")


def _start(run: Run, inherited: Mapping[str, str]) -> None:
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


def _wait_healthy(run: Run, client: Client) -> None:
    while not client.is_healthy():
        if time.monotonic() - run.started > run.spec.start_limit_seconds:
            raise ServeError(
                f"the engine was not healthy after {run.spec.start_limit_seconds:.0f} s"
                f" (expected about {run.spec.load_seconds:.0f} s)",
                fix=f"read {run.spec.files.engine_log}, or raise APPLIANCE_START_LIMIT_SECONDS",
            )
        run.tick()


def _admitted(run: Run, proof: Proof) -> None:
    seconds = round(time.monotonic() - run.started, 1)
    sampled, ranks = counted(proof.samples, "sampled expert"), counted(proof.ranks, "rank")
    placed = f"{sampled} on {ranks} agree with the checkpoint"
    if proof.answers is None:
        words = f"the checkpoint ships no known answers; {placed}"
        run.become("unproved", words, ready_after_seconds=seconds)
    else:
        words = f"{placed}; {counted(proof.answers, 'known answer')} right"
        run.become("ready", words, ready_after_seconds=seconds)


def _drain(run: Run) -> bool:
    """Let accepted requests finish, no longer than the drain limit or a second signal.

    True where nothing is in flight any more.
    """
    spec = run.spec
    client = Client(spec.host, spec.port, first_key(spec.files.control_key), spec.certificate)
    deadline = time.monotonic() + run.spec.drain_seconds
    in_flight = None
    try:
        in_flight = client.post("/gateway/drain")["in_flight"]
        run.become("draining", f"{counted(in_flight, 'request')} in flight")
        while in_flight and time.monotonic() < deadline and run.stop.count < 2:
            time.sleep(TICK_SECONDS)
            in_flight = client.get("/gateway/state")["in_flight"]
            run.observe(run.state)
        if not in_flight:
            _keep_learned(run, client)
    except ServeError as error:
        run.become("stopping", f"the engine did not say what is in flight: {error.message}")
        return False
    words = "every accepted request finished"
    if in_flight:
        words = f"{counted(in_flight, 'request')} cut after {run.spec.drain_seconds:.0f} s"
        if run.stop.count > 1:
            words = f"{counted(in_flight, 'request')} cut: asked to stop at once"
    run.become("stopping", words)
    return not in_flight


def _end(run: Run, patience_seconds: float) -> None:
    if run.child is None:
        return
    identity = run.state.engine_identity or ""
    process.end(run.child.pid, identity, patience_seconds, hurry=lambda: run.stop.count > 1)
    run.child.wait()


def _last_word(run: Run, failure: BaseException | None) -> None:
    # A full disk must not hide why the engine ended.
    with contextlib.suppress(ServeError):
        if failure is None:
            run.become("stopped", run.state.message)
        elif isinstance(failure, ServeError):
            run.become("failed", failure.message, fix=failure.fix)
        else:
            run.become("failed", f"{type(failure).__name__}: {failure}")
