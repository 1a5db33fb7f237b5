"""The container's entry as a process of its own, with the real gateway before a stand-in engine."""

import contextlib
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance import process
from appliance.checkpoint.synth import SynthSpec, synthesize
from appliance.errors import ServeError
from appliance.serve.client import Client, Health, ask_agent
from appliance.serve.keys import first_key
from appliance.serve.state import Files, read_state

REPOSITORY = Path(__file__).resolve().parents[3]
STANDIN = REPOSITORY / "tests" / "appliance" / "serve" / "standin.py"
QUESTION = {"model": "demo", "prompt": [1, 2], "max_tokens": 2}
LONG = {"model": "demo", "prompt": [1], "max_tokens": 2000, "stream": True}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Container:
    """What `appliance container` is to whoever runs it: variables, a log, signals, an exit code."""

    def __init__(
        self, folder: Path, *arguments: str, before: tuple[str, ...] = (),
        stderr: int | None = None, **settings: str,
    ) -> None:  # fmt: skip
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {STANDIN} "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        self.files = Files.of(folder / "state")
        self.port, self.agent_port = free_port(), free_port()
        ours = {
            "STATE_DIR": str(self.files.folder), "ENGINE_PYTHON": str(python), "DEVICE": "cpu",
            "PORT": str(self.port), "AGENT_PORT": str(self.agent_port), "HANG_SECONDS": "8",
            "DRAIN_SECONDS": "20", "SERVED_NAME": "demo", "STREAMS": "4", "CONTEXT_TOKENS": "2048",
            **settings,
        }  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if not k.startswith("APPLIANCE_")}
        environment |= {f"APPLIANCE_{name}": value for name, value in ours.items()}
        environment["PYTHONPATH"] = f"{REPOSITORY}:{REPOSITORY / 'kernels'}"
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "appliance.cli", "container", *arguments],
                env=environment, stdout=log, stderr=stderr or log,
            )  # fmt: skip

    def health(self) -> Health | None:
        try:
            return ask_agent("127.0.0.1", self.agent_port)
        except ServeError:
            return None

    def metrics(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.agent_port, timeout=30)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def wait(self, what, seconds: float = 40.0) -> Health:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            health = self.health()
            if health is not None and what(health):
                return health
            assert self.process.poll() is None or not seconds, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(f"never came to it: {self.health()}\n{self.log.read_text()}")

    def wait_ready(self) -> Health:
        return self.wait(lambda health: health.ready)

    def client(self) -> Client:
        return Client("127.0.0.1", self.port, first_key(self.files.keys))

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("models") / "demo"
    synthesize(folder, SynthSpec())
    return str(folder)


@pytest.fixture
def container(tmp_path):
    made = []

    def start(*arguments: str, **how) -> Container:
        made.append(Container(tmp_path, *arguments, **how))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            one.process.send_signal(signal.SIGTERM)
            one.process.wait(60)


def test_it_serves_through_all_four_steps_and_ends_with_0_when_stopped(container, model):
    running = container(MODEL=model)
    health = running.wait_ready()
    assert health.body["phase"] in ("ready", "unproved")
    assert running.client().post("/v1/completions", QUESTION)["choices"][0]["token_ids"] == [2, 3]
    assert running.end() == 0
    steps = [line.partition(":")[0] for line in running.log.read_text().splitlines()]
    assert [s for s in steps if s in ("preflight", "plan", "bind", "engine")][:4] == [
        "preflight", "plan", "bind", "engine"
    ]  # fmt: skip


def streamed(running: Container, tokens: int) -> Iterator[list[str]]:
    """A request under way in a thread, and its text once it is over."""
    got: list[str] = []
    asked = {**LONG, "max_tokens": tokens}

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        key = first_key(running.files.keys)
        connection.request("POST", "/v1/completions", json.dumps(asked),
                           {"Authorization": f"Bearer {key}"})  # fmt: skip
        with contextlib.suppress(OSError, http.client.HTTPException):
            got.append(connection.getresponse().read().decode())
        connection.close()

    thread = threading.Thread(target=ask)
    thread.start()
    control = Client("127.0.0.1", running.port, first_key(running.files.control_key))
    while not control.get("/gateway/state")["in_flight"]:
        time.sleep(0.02)
    yield got
    thread.join(60)


def test_when_nobody_reads_its_log_any_more_it_serves_on_and_still_drains(container, model):
    """As where the journal is restarted, or the `tee` behind it is ended."""
    reading, writing = os.pipe()
    running = container(MODEL=model, stderr=writing)
    os.close(writing)
    threading.Thread(target=lambda: os.read(reading, 1 << 20), daemon=True).start()
    running.wait_ready()
    os.close(reading)
    with contextlib.contextmanager(streamed)(running, 40) as got:
        assert running.end() == 0
    assert got and got[0].count("data: {}") == 40


def test_a_terminal_that_goes_away_drains_it_and_leaves_no_engine_behind(container, model):
    running = container(MODEL=model)
    running.wait_ready()
    with contextlib.contextmanager(streamed)(running, 40) as got:
        assert running.end(signal.SIGHUP) == 0
    assert got and got[0].count("data: {}") == 40
    assert not read_state(running.files).engine_is_running


def test_what_nohup_started_serves_on_when_the_terminal_goes_away(container, model):
    running = container(MODEL=model, before=("nohup",))
    running.wait_ready()
    running.process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert running.process.poll() is None and running.health().ready


def test_metrics_name_plan_phase_and_findings(container, model):
    running = container(MODEL=model, RELEASE="9.9")
    running.wait_ready()
    text = running.metrics()
    assert 'moe_appliance_plan_experts{rank="0",home="host"}' in text
    assert 'moe_appliance_info{release="9.9",image_digest=""} 1' in text
    assert 'moe_appliance_preflight_findings{severity="fail"} 0' in text


def test_a_failed_step_ends_with_its_own_code_and_leaves_the_reason(container):
    running = container(MODEL="/nowhere")
    assert running.process.wait(40) == 5
    left = json.loads((running.files.folder / "failure.json").read_text())
    assert left["step"] == "plan" and left["exit_code"] == 5 and "/nowhere" in left["message"]
    assert "error: plan failed (exit code 5)" in running.log.read_text()


def test_a_machine_without_gpus_fails_preflight_with_3_and_never_falls_back_to_the_cpu(
    container, model
):
    running = container(MODEL=model, DEVICE="cuda")
    assert running.process.wait(40) == 3
    assert "error: preflight failed (exit code 3)" in running.log.read_text()


def test_a_failure_that_is_held_stays_up_says_why_and_ends_with_the_code_when_stopped(container):
    running = container(MODEL="/nowhere", HOLD_ON_FAILURE="true")
    health = running.wait(lambda health: "plan failed" in str(health.body["last_finding"]))
    assert not health.ready and "/nowhere" in health.body["message"]
    time.sleep(1.0)
    assert running.process.poll() is None
    assert running.end() == 5


def test_a_failure_that_is_held_before_there_was_an_engine_is_the_phase_that_alerts_see(container):
    running = container(MODEL="/nowhere", HOLD_ON_FAILURE="true")
    running.wait(lambda health: health.body["held"])
    text = running.metrics()
    assert 'moe_appliance_phase{phase="failed"} 1\n' in text
    assert 'moe_appliance_phase{phase="ready"} 0\n' in text
    assert "\nmoe_appliance_phase_since_seconds " not in text  # unknown is no 0


def test_metrics_are_answered_in_time_while_the_engine_is_silent_and_say_nothing_of_before(
    container, model
):
    running = container(MODEL=model, HANG_SECONDS="120")
    running.wait_ready()
    deadline = time.monotonic() + 20
    while "vllm:num_requests_running" not in running.metrics():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.kill(read_state(running.files).engine_pid, signal.SIGSTOP)
    try:
        while "vllm:num_requests_running" in running.metrics():
            assert time.monotonic() < deadline + 30
            time.sleep(0.5)
        began = time.monotonic()
        text = running.metrics()
        assert time.monotonic() - began < 8
        assert 'moe_appliance_phase{phase="' in text and "moe_appliance_picks_total" not in text
    finally:
        os.kill(read_state(running.files).engine_pid, signal.SIGCONT)


def test_a_failure_is_held_also_where_its_reason_cannot_be_written(container, tmp_path):
    (tmp_path / "state" / "failure.json" / "in the way").mkdir(parents=True)
    running = container(MODEL="/nowhere", HOLD_ON_FAILURE="true")
    health = running.wait(lambda health: health.body["held"])
    assert not health.ready and "/nowhere" in health.body["message"]
    assert running.end() == 5
    assert "cannot write" in running.log.read_text()


def test_a_state_directory_that_cannot_take_the_caches_is_held_like_any_other_failure(
    container, model, tmp_path
):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "cache").write_text("a file where a folder should be")
    running = container(MODEL=model, HOLD_ON_FAILURE="true")
    health = running.wait(lambda health: health.body["held"])
    assert health.body["message"].startswith("bind failed: ") and "cache" in health.body["message"]
    assert running.end() == 6


def test_an_unknown_setting_is_wrong_usage_and_suggests_the_right_one(container, model):
    running = container(MODEL=model, STREEMS="4")
    assert running.process.wait(20) == 2
    assert "did you mean APPLIANCE_STREAMS?" in running.log.read_text()


def test_an_engine_that_dies_while_it_serves_ends_the_container_even_where_failures_are_held(
    container, model
):
    running = container(MODEL=model, HOLD_ON_FAILURE="true")
    running.wait_ready()
    os.kill(read_state(running.files).engine_pid, signal.SIGKILL)
    assert running.process.wait(40) == 7
    assert "was ended by SIGKILL" in running.log.read_text()


def test_a_frozen_engine_is_found_within_60_s_and_started_again_once(container, model):
    running = container(MODEL=model)
    running.wait_ready()
    before = read_state(running.files)
    os.kill(before.engine_pid, signal.SIGSTOP)
    frozen = time.monotonic()
    health = running.wait(lambda health: health.body["restarts"] == 1, seconds=60.0)
    assert time.monotonic() - frozen < 60
    assert "it hangs" in health.body["last_finding"]
    running.wait_ready()
    after = read_state(running.files)
    assert after.engine_pid != before.engine_pid
    assert process.identity(before.engine_pid) is None
    assert running.client().post("/v1/completions", QUESTION)["choices"][0]["token_ids"] == [2, 3]


def test_a_frozen_core_is_found_although_it_still_counts_no_request(container, model, monkeypatch):
    monkeypatch.setenv("STANDIN", "freezes")
    running = container(MODEL=model)
    running.wait_ready()
    before = read_state(running.files).engine_pid

    def ask() -> None:
        with contextlib.suppress(ServeError):
            list(running.client().events("/v1/completions", LONG))

    asking = threading.Thread(target=ask)
    asking.start()
    health = running.wait(lambda health: health.body["restarts"] == 1, seconds=60.0)
    assert "with 1 request queued: it hangs" in health.body["last_finding"]
    asking.join(20)
    running.wait_ready()
    assert read_state(running.files).engine_pid != before


def test_a_client_that_is_slow_to_send_its_body_is_no_hang(container, model):
    running = container(MODEL=model)
    running.wait_ready()
    before = read_state(running.files).engine_pid
    key = first_key(running.files.keys)
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            "Content-Length: 1000\r\n\r\n{")  # fmt: skip
    with socket.create_connection(("127.0.0.1", running.port)) as slow:
        slow.sendall(head.encode())
        time.sleep(20)
    assert read_state(running.files).engine_pid == before
    assert running.health().body["restarts"] == 0


def test_an_engine_that_is_busy_for_longer_than_the_limit_is_not_killed(container, model):
    running = container(MODEL=model)
    running.wait_ready()
    before = read_state(running.files).engine_pid
    events = list(running.client().events("/v1/completions", {**LONG, "max_tokens": 300}))
    assert len(events) == 300
    assert read_state(running.files).engine_pid == before
    assert running.health().body["restarts"] == 0


def test_of_1000_requests_around_a_drain_every_accepted_one_finishes(container, model):
    running = container(MODEL=model)
    running.wait_ready()
    answers, lock = [], threading.Lock()

    def ask(count: int) -> None:
        for _ in range(count):
            try:
                body = {**QUESTION, "stream": True, "max_tokens": 4}
                events = list(running.client().events("/v1/completions", body))
                outcome = len(events)
            except ServeError as error:
                outcome = error.message
            with lock:
                answers.append(outcome)

    threads = [threading.Thread(target=ask, args=(50,)) for _ in range(20)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    code = running.end()
    for thread in threads:
        thread.join(120)
    assert code == 0 and len(answers) == 1000
    finished = [a for a in answers if a == 4]
    refused = [a for a in answers if isinstance(a, str)
               and ("answered 503" in a or "got no answer" in a)]  # fmt: skip
    assert len(finished) + len(refused) == 1000, set(answers) - {4}
    assert finished, "nothing was accepted: the test proved nothing"
