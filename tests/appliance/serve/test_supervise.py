"""The real supervisor over a stand-in engine: every way a start or an end can go wrong."""

import http.client
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from drain_load import FINISHED, ask

from appliance import process
from appliance.errors import ServeError
from appliance.serve import run
from appliance.serve import supervise as supervise_module
from appliance.serve.client import Client
from appliance.serve.keys import first_key
from appliance.serve.state import make_folder, read_state
from appliance.serve.supervise import StopRequest, supervise

from .conftest import environment


def failure_of(spec, wrong) -> ServeError:
    with pytest.raises(ServeError) as caught:
        supervise(spec, environment(wrong), lambda state: None, StopRequest())
    state = read_state(spec.files)
    assert state.phase == "failed" and state.message == caught.value.message
    assert not state.engine_is_running
    return caught.value


def user(spec) -> Client:
    return Client(spec.host, spec.port, first_key(spec.files.keys))


def control(spec) -> Client:
    return Client(spec.host, spec.port, first_key(spec.files.control_key))


COMPLETION = {"model": "tiny", "prompt": [1, 2], "max_tokens": 2}


def test_an_engine_that_proves_itself_becomes_ready_and_serves(supervised):
    running = supervised()
    state = running.wait_for("ready")
    assert "1 known answer right" in state.message and "4 sampled experts" in state.message
    answer = user(running.spec).post("/v1/completions", COMPLETION)
    assert answer["choices"][0]["token_ids"] == [2, 3]
    phases = list(dict.fromkeys(told.phase for told in running.told))
    assert phases == ["starting", "proving", "ready"]
    counters = control(running.spec).get("/appliance/state")["ranks"]
    assert [one["resets"] for one in counters] == [1], "warm-up and proof are not traffic"


def test_without_known_answers_it_serves_and_says_that_answers_are_unproved(supervised, model):
    (model / "expectations.json").unlink()
    state = supervised().wait_for("unproved")
    assert state.message.startswith("the checkpoint ships no known answers")
    assert state.words == "serving, answers unproved"


def test_nobody_gets_an_answer_before_the_proof(supervised):
    running = supervised("hangs while proving")
    running.wait_for("proving")
    with pytest.raises(ServeError, match="answered 503: the engine has not proved itself yet"):
        user(running.spec).post("/v1/completions", COMPLETION)


def test_a_death_at_the_start_names_the_cause_and_not_its_consequence(standin_spec):
    error = failure_of(standin_spec, "dies at start")
    assert error.message == (
        "the engine exited with status 1 while starting: ValueError: No available memory"
    )
    assert str(standin_spec.files.engine_log) in error.fix


def test_a_death_while_proving_is_reported_as_one(standin_spec):
    message = failure_of(standin_spec, "dies while proving").message
    assert "SIGKILL" in message and "while proving: RuntimeError: the arena is gone" in message


def test_a_death_while_it_serves_says_so_whether_answers_were_proved_or_not(supervised, model):
    (model / "expectations.json").unlink()
    running = supervised()
    os.kill(running.wait_for("unproved").engine_pid, signal.SIGTERM)
    assert "the engine was ended by SIGTERM while serving" in running.wait_for("failed").message


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("bad homes", "the engine does not hold what the plan says: layer 1 expert 3 (host)"),
        ("proves nothing", "it compared no expert with the checkpoint"),
        ("wrong tokens", "known answer 1 is wrong from token 4 of 4: expected [10], got [11]"),
        ("no progress", "the engine answers but counts no progress"),
    ],
)
def test_an_engine_that_proves_wrong_is_ended(standin_spec, wrong, sentence):
    assert sentence in failure_of(standin_spec, wrong).message


def test_an_engine_that_never_gets_healthy_is_given_up_with_the_limit(supervised):
    running = supervised("never healthy", start_limit_seconds=1.5)
    state = running.wait_for("failed")
    assert "not healthy after 2 s" in state.message and not state.engine_is_running


def test_a_stop_lets_a_stream_finish_and_refuses_new_requests(supervised):
    running = supervised()
    running.wait_for("ready")
    events = []
    body = {**COMPLETION, "stream": True, "max_tokens": 30}
    stream = user(running.spec).events("/v1/completions", body)
    events.append(next(stream))
    running.stop.ask()
    running.wait_for("draining")
    with pytest.raises(ServeError, match="answered 503: the server is shutting down"):
        user(running.spec).post("/v1/completions", COMPLETION)
    events += list(stream)
    assert len(events) == 30
    assert running.wait_for("stopped").message == "every accepted request finished"


def test_a_second_signal_cuts_what_is_in_flight(supervised):
    running = supervised(drain_seconds=60.0)
    running.wait_for("ready")
    body = {**COMPLETION, "stream": True, "max_tokens": 4000}
    stream = user(running.spec).events("/v1/completions", body)
    next(stream)

    def read_to_the_cut():
        with pytest.raises((ServeError, OSError, http.client.HTTPException)):
            list(stream)

    cut = threading.Thread(target=read_to_the_cut)
    cut.start()
    running.stop.ask()
    running.wait_for("draining")
    running.stop.ask()
    assert running.wait_for("stopped").message == "1 request cut: asked to stop at once"
    cut.join(10)


def test_an_engine_that_ignores_sigterm_is_killed(supervised):
    running = supervised("ignores SIGTERM")
    state = running.wait_for("ready")
    running.stop.count = 2
    running.wait_for("stopped")
    assert process.identity(state.engine_pid) is None


def test_a_stop_before_ready_ends_the_engine(supervised):
    running = supervised("hangs while proving")
    state = running.wait_for("proving")
    running.stop.ask()
    assert running.wait_for("stopped").message == "stopped before it was ready"
    assert process.identity(state.engine_pid) is None


def test_a_second_supervisor_is_refused_with_the_name_and_port_of_the_first(supervised):
    running = supervised()
    running.wait_for("ready")
    with pytest.raises(ServeError, match=f"tiny .* already runs .* on port {running.spec.port}"):
        supervise(running.spec, environment(), lambda state: None, StopRequest())


def test_keys_never_appear_in_arguments_or_logs(supervised):
    running = supervised()
    state = running.wait_for("ready")
    user(running.spec).post("/v1/completions", COMPLETION)
    keys = [first_key(running.spec.files.keys), first_key(running.spec.files.control_key)]
    proc = Path(f"/proc/{state.engine_pid}")
    written = [proc / "cmdline", proc / "environ", state.log, running.spec.files.state]
    seen = running.spec.command() + "".join(path.read_text() for path in written)
    assert not [key for key in keys if key in seen]
    for path in (running.spec.files.keys, running.spec.files.control_key, state.log):
        assert path.stat().st_mode & 0o077 == 0


def unwritable(files) -> None:
    """As on a full disk: whatever is written aside cannot take the state file's place."""
    files.state.unlink()
    (files.state / "in the way").mkdir(parents=True)


def test_a_state_that_cannot_be_written_ends_no_engine_that_serves(
    supervised, monkeypatch, tmp_path
):
    """The disk is full when what the cache learned is to be kept, and this is to be said, too."""
    monkeypatch.setattr(supervise_module, "EVERY_SECONDS", 0.5)
    monkeypatch.setattr(run, "REWRITE_SECONDS", 0.2)
    running = supervised(learned=tmp_path / "learned.json")
    running.wait_for("ready")
    files = running.spec.files
    unwritable(files)
    deadline = time.monotonic() + 10
    while not any("was not kept" in (state.message or "") for state in running.told):
        assert not running.ended and time.monotonic() < deadline, running.ended
        time.sleep(0.05)
    assert user(running.spec).post("/v1/completions", COMPLETION)["choices"]
    (files.state / "in the way").rmdir()
    files.state.rmdir()
    while not files.state.exists():
        assert not running.ended and time.monotonic() < deadline, running.ended
        time.sleep(0.05)
    assert read_state(files).phase == "ready" and "was not kept" in read_state(files).message


def test_a_state_that_cannot_be_written_cuts_no_request_when_it_is_stopped(supervised):
    running = supervised()
    running.wait_for("ready")
    key = first_key(running.spec.files.keys)
    got: list[str] = []
    body = {"prompt": [1], "max_tokens": 40, "stream": True}
    whole = lambda text: text.count("data: {}") == 40  # noqa: E731
    spec = running.spec
    asking = threading.Thread(
        target=lambda: got.append(ask(spec.host, spec.port, key, body, whole))
    )
    asking.start()
    control = Client(spec.host, spec.port, first_key(spec.files.control_key))
    while not control.get("/gateway/state")["in_flight"]:
        time.sleep(0.01)
    unwritable(spec.files)
    running.stop.ask()
    asking.join(30)
    assert got == [FINISHED]
    deadline = time.monotonic() + 30
    while not running.ended and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running.ended[0].message == "every accepted request finished"


def test_without_room_for_the_state_nothing_is_started(standin_spec):
    make_folder(standin_spec.files)
    (standin_spec.files.state / "in the way").mkdir(parents=True)
    one = run.Run(standin_spec, StopRequest(), lambda state: None, run.first_state(standin_spec))
    with pytest.raises(ServeError, match=r"cannot write .*state\.json"):
        one.become("starting")
