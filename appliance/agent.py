"""Beside the engine: health routes and /metrics on a port of their own, and hang detection.

/healthz  200 while this process lives: what a container's own check may restart on
/startz   200 once there is nothing more to wait for: it serves, or a failed start is held
/readyz   200 once the engine has proved itself and takes requests; else 503 with the reason
/livez    200 unless the engine hangs; loading, proving and long prefills are not hangs
/metrics  Prometheus text
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from appliance import process
from appliance.errors import ServeError
from appliance.progress import Hang, Sample, Watch, read_sample
from appliance.serve.client import Client
from appliance.serve.keys import first_key
from appliance.serve.run import StopRequest
from appliance.serve.spec import ServeSpec
from appliance.serve.state import SERVING, Files, State
from appliance.serve.supervise import supervise

POLL_SECONDS = 5.0
ANSWER_SECONDS = 5.0
CORE_SECONDS = 3.0
RETRY_SECONDS = 5
SECOND_HANG_SECONDS = 3600.0  # a hang so soon after a restart: the restart did not help


class Agent:
    """One per supervisor. `observe` is told every state; `metrics` makes the text of /metrics.

    Without an address it only watches for hangs.
    """

    def __init__(
        self,
        files: Files,
        address: tuple[str, int] | None,
        hang_seconds: float,
        metrics: Callable[[Agent], str] = lambda agent: "",
    ) -> None:
        self._files = files
        self._watch = Watch(hang_seconds)
        self._metrics = metrics
        self._stopping = threading.Event()
        self._server = None if address is None else _listen(address, self)
        self.step = "settings"  # of the container, before there is a state
        self.state: State | None = None
        self.hang: Hang | None = None  # the one that is being dealt with
        self.last_finding: str | None = None
        self.sample: Sample | None = None  # the last look at the engine's progress
        self.restarts = 0
        self.held = False  # a failed start stays up to be looked at
        self.exposition = ""  # the engine's own metrics, as last read

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.server_address[1])

    def __enter__(self) -> Agent:
        threading.Thread(target=self._poll, daemon=True).start()
        if self._server is not None:
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def observe(self, state: State) -> None:
        self.state = state

    def restarted(self) -> None:
        """The hang was dealt with: the engine is being started again."""
        self.restarts += 1
        self.hang = None
        self._watch.forget()

    def answer(self, path: str) -> tuple[int, dict[str, object]]:
        """Status and body of a health route."""
        state = self.state
        phase = self.step if state is None else state.phase
        body: dict[str, object] = {
            "phase": phase,
            "since": None if state is None else state.since,
            "message": self._reason(),
            "restarts": self.restarts,
            "last_finding": self.last_finding,
            "held": self.held,
            "steps": None if self.sample is None else self.sample.steps,
            "queued": None if self.sample is None else self.sample.queued,
        }
        fine = {
            "/healthz": True,
            "/startz": self.held or (state is not None and state.phase in SERVING),
            "/readyz": state is not None and state.phase in SERVING and self.hang is None,
            "/livez": self.hang is None,
        }
        if path not in fine:
            return 404, {"message": f"no such route: {path}"}
        return (200 if fine[path] else 503), body

    def _reason(self) -> str | None:
        if self.hang is not None:
            return self.hang.words
        if self.state is None:
            return self.last_finding or f"at the step {self.step}"
        return self.state.message

    def _poll(self) -> None:
        while not self._stopping.wait(POLL_SECONDS):
            state = self.state
            if state is None or state.phase not in SERVING:
                self._watch.forget()
                self.sample, self.exposition = None, ""  # of an engine that is no more
                continue
            self.sample = self._sample(state)
            hang = self._watch.see(self.sample)
            if hang is not None and self.hang is None:
                self.hang, self.last_finding = hang, hang.words
                end_engine(state)

    def _sample(self, state: State) -> Sample:
        at = time.monotonic()
        try:
            key = first_key(self._files.control_key)
            client = Client(state.host, state.port, key, state.certificate, ANSWER_SECONDS)
            self.exposition = client.text("/metrics")
            sample = read_sample(self.exposition, at)
            in_flight = client.get("/gateway/state")["in_flight"]
        except (ServeError, ValueError, KeyError, TypeError):
            # No answer, or none that makes sense; an old one says nothing of now.
            self.exposition = ""
            return Sample(at, None, None)
        if sample.queued == 0 and in_flight and not core_answers(client):
            # The queue is counted by the process that hangs: it still says what it said before.
            return replace(sample, queued=float(in_flight))
        return sample

    def page(self) -> str:
        return self._metrics(self)


def attend(
    agent: Agent,
    spec: ServeSpec,
    inherited: Mapping[str, str],
    observe: Callable[[State], None],
    stop: StopRequest,
    say: Callable[[str], None],
) -> State:
    """Supervise until stopped; the last state. A hung engine is started again, but not twice soon.

    Raises ServeError as `supervise` does, and where the engine hangs again within an hour.
    """
    last_hang: float | None = None

    def told(state: State) -> None:
        agent.observe(state)
        observe(state)

    while True:
        try:
            return supervise(spec, inherited, told, stop)
        except ServeError as error:
            hang, now = agent.hang, time.monotonic()
            if hang is None:
                raise
            if last_hang is not None and now - last_hang < SECOND_HANG_SECONDS:
                raise ServeError(
                    f"{hang.words} again, {now - last_hang:.0f} s after it was restarted for that",
                    fix="appliance support-bundle, and report it",
                ) from error
            last_hang = now
            say(f"{hang.words}; starting it again")
            agent.restarted()


def core_answers(client: Client) -> bool:
    """Whether the engine's loop answers between two steps. A client that is slow to send its body
    is in flight, too, and no reason to end an engine."""
    try:
        replace(client, timeout_seconds=CORE_SECONDS).get("/appliance/state")
    except ServeError:
        return False
    return True


def end_engine(state: State) -> None:
    """End a hung engine at once: it will not drain. Its supervisor sees the death."""
    if state.engine_pid is not None and state.engine_identity is not None:
        process.end(state.engine_pid, state.engine_identity, 0.0)


def _listen(address: tuple[str, int], agent: Agent) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # a client that sends nothing does not hold a thread

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, agent.page(), "text/plain; version=0.0.4; charset=utf-8")
                return
            status, body = agent.answer(self.path)
            self._send(status, json.dumps(body) + "\n", "application/json")

        def _send(self, status: int, text: str, kind: str) -> None:
            raw = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(raw)))
            if status == 503:
                self.send_header("Retry-After", str(RETRY_SECONDS))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            """A probe every few seconds is no news."""

    try:
        return ThreadingHTTPServer(address, Handler)
    except OSError as error:
        raise ServeError(
            f"the agent cannot listen on {address[0]}:{address[1]}: {error.strerror}",
            fix="choose another port with APPLIANCE_AGENT_PORT",
        ) from error
