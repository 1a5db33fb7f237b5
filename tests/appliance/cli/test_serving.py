"""up, status, logs and down through the real command line; the stand-in plays vLLM."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import stat
import sys
import time
from pathlib import Path

import pytest

from appliance import process
from appliance.plan.model import load_plan
from appliance.serve.state import Files, read_state

STANDIN = Path(__file__).parents[1] / "serve" / "standin.py"
KNOWN = {"prompt": [5, 9], "tokens": [6, 10, 6], "leads": [1.0, 1.0, 1.0]}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def standin(tmp_path, monkeypatch, model, port) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in */slow*) export STANDIN="never healthy";; esac\n'
        f'exec {sys.executable} {STANDIN} "$@"\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("APPLIANCE_ENGINE_PYTHON", str(python))
    monkeypatch.setenv("APPLIANCE_PORT", str(port))
    kept = {"schema_version": 1, "cases": [KNOWN]}
    (model / "expectations.json").write_text(json.dumps(kept))


@pytest.fixture
def state(own_state, own_process):
    """The state file's content, at any time; what runs at the end is stopped."""
    yield lambda: read_state(Files.of(own_state))
    for _ in range(2):
        own_process("down")
    last = read_state(Files.of(own_state))
    assert last is None or not (last.engine_is_running or last.supervisor_is_running)


def test_up_detached_returns_when_it_serves_and_down_stops_it(own_process, standin, state, model,
                                                              port, own_state):  # fmt: skip
    up = own_process("up", "--model", model, "--detach", "--name", "small")
    assert up.code == 0, up.err
    assert "ready: 4 sampled experts on 1 rank agree with the checkpoint; 1 known" in up.err
    shown = json.loads(own_process("status", "--json").out)
    assert (shown["serving"], shown["served_name"], shown["port"]) == (True, "small", port)
    assert shown["gateway"] == {"admitted": True, "draining": False, "in_flight": 0}
    assert shown["plan_digest"] and Path(shown["plan"]) == own_state / "plan.json"
    assert status_without_key(port) == 401

    again = own_process("up", "--model", model, "--detach")
    assert again.code == 1
    assert f"already runs from {own_state} on port {port}" in again.err

    other = own_process("up", "--model", model, APPLIANCE_STATE_DIR=str(own_state / "other"))
    assert other.code == 1
    assert f"port {port} on 127.0.0.1 is held by python" in other.err
    assert f"(process {state().engine_pid})" in other.err

    down = own_process("down")
    assert down.code == 0 and "every accepted request finished" in down.err
    assert state().phase == "stopped"
    stopped = own_process("status")
    assert stopped.code == 3 and "stopped" in stopped.out
    assert "nothing was running" in own_process("down").err


def status_without_key(port: int) -> int:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as asked:
        asked.request("GET", "/v1/models")
        return asked.getresponse().status


def test_up_without_a_model_serves_what_was_served_last(own_process, standin, state, model):
    nothing = own_process("up")
    assert nothing.code == 2 and "which model?" in nothing.err
    assert own_process("up", "--model", model, "--detach").code == 0
    assert own_process("down").code == 0
    assert own_process("up", "--detach").code == 0
    assert state().model == model


def test_up_without_a_model_serves_as_and_where_it_was_but_for_what_is_said_now(
    own_process, standin, state, model, port, monkeypatch
):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        other = probe.getsockname()[1]
    monkeypatch.delenv("APPLIANCE_PORT")
    asked = ("--port", other, "--name", "flash", "--streams", 3, "--context", 512)
    assert own_process("up", "--model", model, *asked, "--detach").code == 0
    assert own_process("down").code == 0
    assert own_process("up", "--detach").code == 0
    assert shown(state()) == ("flash", other, 3, 512)
    assert own_process("down").code == 0
    again = own_process("up", "--streams", 2, "--detach", APPLIANCE_PORT=str(port))
    assert again.code == 0, again.err
    assert shown(state()) == ("flash", port, 2, 512)


def shown(state) -> tuple[object, ...]:
    serving = load_plan(state.plan).serving
    return state.served_name, state.port, serving.streams, serving.context_tokens


def test_of_two_starts_at_once_one_serves_and_the_other_says_that_it_is_under_way(
    standin, state, model, own_state, own_process
):
    """Each would write its plan and its log over the other's."""
    up = [sys.executable, "-m", "appliance.cli", "up", "--model", str(model), "--detach"]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    logs = [own_state.with_name(f"up-{n}.log") for n in range(2)]
    started = [process.spawn(up, environment=environment, log=log) for log in logs]
    codes = [one.wait(120) for one in started]
    assert sorted(codes) == [0, 1]
    said = logs[codes.index(1)].read_text()
    assert re.search(r"^error: (another start from .* is under way|.* already runs from)", said)
    assert "\n  fix: " in said


def test_a_start_that_fails_before_there_is_a_state_says_its_own_error_and_fix(
    own_process, standin, state, model, own_state
):
    own_state.mkdir(mode=0o700)
    (own_state / "keys").write_text("\n")
    up = own_process("up", "--model", model, "--detach")
    assert up.code == 1
    assert up.err.endswith(
        f"error: the key file {own_state / 'keys'} holds no key\n"
        "  fix: write one key a line, or remove the file\n"
    )
    (own_state / "keys").unlink()
    (own_state / "keys").mkdir()
    up = own_process("up", "--model", model, "--detach")
    assert up.err.splitlines()[-2:] == [
        f"error: cannot read the key file {own_state / 'keys'}: Is a directory",
        "  fix: it is a text file, one key a line, that whoever serves may read",
    ]


def test_ctrl_c_while_a_detached_start_is_awaited_says_that_it_goes_on(
    standin, state, model, own_state, own_process, monkeypatch
):
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    up = [sys.executable, "-m", "appliance.cli", "up", "--model", str(model), "--detach"]
    log = own_state.with_name("up.log")
    started = process.spawn(up, environment=environment, log=log)
    deadline = time.monotonic() + 90
    while (state() is None or state().phase != "starting") and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(started.pid, signal.SIGINT)
    assert started.wait(90) == 130
    assert log.read_text().splitlines()[-1] == (
        "it goes on starting in the background: `appliance status` shows it,"
        " `appliance down` ends it"
    )
    while state().phase != "ready" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert state().phase == "ready"


def test_ctrl_c_in_an_upgrade_goes_back_says_so_and_exits_130(
    standin, state, model, own_state, own_process
):
    asked = ("--name", "flash", "--streams", 3)
    assert own_process("up", "--model", model, *asked, "--detach").code == 0
    before = shown(state())
    slow = shutil.copytree(model, model.with_name("slow"))
    log = own_state.with_name("upgrade.log")
    argv = ["upgrade", "run", "--release", "2", "--model", str(slow)]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    started = process.spawn(
        [sys.executable, "-m", "appliance.cli", *argv], environment=environment, log=log
    )
    deadline = time.monotonic() + 90
    while state().model != slow and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(started.pid, signal.SIGINT)
    assert started.wait(90) == 130
    said = log.read_text().splitlines()
    assert said[-2:] == [
        "upgrade: switch: interrupted; going back to as started",
        "still serving as started: switch: interrupted",
    ]
    assert (state().phase, state().model, *shown(state())) == ("ready", model, *before)


def test_a_failed_start_exits_one_with_the_cause_and_leaves_nothing(own_process, standin, state,
                                                                    model):  # fmt: skip
    up = own_process("up", "--model", model, "--detach", STANDIN="dies at start")
    assert up.code == 1
    assert (
        "error: the engine exited with status 1 while starting: ValueError: No available memory"
        in up.err
    )
    assert "Traceback" not in up.err
    assert "failed" in own_process("status").out
    assert "Engine core initialization failed" in own_process("logs").out


def test_a_plan_for_another_checkpoint_or_none_at_all_is_refused(own_process, standin, model,
                                                                 tmp_path, appliance):  # fmt: skip
    other = tmp_path / "other"
    appliance("weights", "synth", other, "--experts", 8, "--top-k", 2)
    appliance("plan", "make", "--model", other, "-o", tmp_path / "other.json")
    up = own_process("up", "--model", model, "--plan", tmp_path / "other.json")
    assert up.code == 1 and "the plan was made for another checkpoint" in up.err
    (tmp_path / "bad.json").write_text("{")
    up = own_process("up", "--model", model, "--plan", tmp_path / "bad.json")
    assert up.code == 1 and "is not JSON" in up.err


def test_a_dry_run_prints_the_command_and_touches_nothing(appliance, model, own_state):
    said = appliance("up", "--model", model, "--dry-run", "--port", 8123)
    assert said.code == 0 and said.out.count("\n") == 1
    assert f"serve {model} --host 127.0.0.1 --port 8123" in said.out
    assert not own_state.exists()


def test_up_says_that_it_planned_anew_and_that_a_plan_in_the_folder_is_not_served(
    appliance, model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    up = ("up", "--model", model, "--dry-run")
    assert "no --plan is given: planned anew, not written" in appliance(*up).err
    for share, told in ((0.5, False), (0.25, True)):  # 0.5 is what `up` makes without a GPU
        appliance("plan", "make", "--model", model, "--host-share", share, "--device", "cpu")
        said = appliance(*up, "--host-share", 0.5, "--device", "cpu")
        assert said.code == 0
        assert ("note: plan.json in this folder is another plan of this model" in said.err) is told
    given = appliance(*up, "--plan", "plan.json")
    assert given.code == 0 and "no --plan" not in given.err and "plan.json in this" not in given.err


WISHES = {
    "--device": "cpu", "--device-memory": "8GiB", "--tensor-parallel": 1, "--streams": 9,
    "--conversations": 20, "--context": 512, "--kv-dtype": "auto", "--host-share": 0.5,
    "--cache-slots": 1, "--heat": "counts.json",
}  # fmt: skip


@pytest.mark.parametrize("option", [*WISHES, "--expert-parallel"])
def test_a_wish_for_another_plan_beside_a_plan_is_refused(
    appliance, model, tmp_path, monkeypatch, option
):
    made = tmp_path / "made.json"
    appliance("plan", "make", "--model", model, "-o", made)
    words = [option, WISHES[option]] if option in WISHES else [option]
    said = appliance("up", "--model", model, "--plan", made, "--dry-run", *words)
    assert (said.code, said.out) == (2, "")
    assert f"error: --plan {made} is given, and {option} would make another plan" in said.err
    monkeypatch.setenv("APPLIANCE_PLAN", str(made))
    said = appliance("up", "--model", model, "--dry-run", *words)
    assert said.code == 2 and f"APPLIANCE_PLAN is {made}, and {option} would" in said.err


def test_the_options_that_a_plan_does_not_settle_go_with_one(appliance, model, tmp_path):
    made = tmp_path / "made.json"
    appliance("plan", "make", "--model", model, "-o", made, "--streams", 3)
    words = ("--name", "small", "--port", 8123, "--host", "127.0.0.2")
    said = appliance("up", "--model", model, "--plan", made, "--dry-run", *words)
    assert said.code == 0, said.err
    assert "--max-num-seqs 3" in said.out and "--port 8123" in said.out


def test_a_killed_supervisor_is_noticed_and_down_ends_its_engine(own_process, standin, state,
                                                                 model):  # fmt: skip
    assert own_process("up", "--model", model, "--detach").code == 0
    os.kill(state().supervisor_pid, signal.SIGKILL)
    shown = own_process("status")
    assert shown.code == 3
    assert f"is gone without a word; its engine (process {state().engine_pid}) still runs" in (
        shown.out
    )
    # When it ended nobody knows, and the state file says since when it had served.
    assert re.search(r"^state +failed$", shown.out, re.MULTILINE) and "since" not in shown.out
    assert "appliance down" in shown.out
    assert json.loads(own_process("status", "--json").out)["since"] is None
    engine = state().engine_pid
    assert own_process("down").code == 0
    assert process.identity(engine) is None


def test_a_killed_engine_is_a_failure_with_a_way_out_and_the_canary_finds_the_port(
    own_process, standin, state, model, port, monkeypatch
):
    monkeypatch.setenv("APPLIANCE_PORT", "9")
    nothing = own_process("canary")
    assert nothing.code == 1 and "no appliance serves from this state directory" in nothing.err
    assert own_process("up", "--model", model, "--detach", "--port", port).code == 0
    asked = own_process("canary")
    assert asked.code == 1 and "GET /v1/models answered 500" in asked.err  # the stand-in has none
    asked = own_process("canary", "127.0.0.1", 9)
    assert "GET /v1/models got no answer from 127.0.0.1:9: Connection refused" in asked.err
    os.kill(state().engine_pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while state().phase != "failed" and time.monotonic() < deadline:
        time.sleep(0.05)
    said = own_process("status").out
    assert "the engine was ended by SIGKILL while serving (the kernel does that when" in said
    assert re.search(r"^fix +read the whole log: .*engine.log; `appliance up` starts", said, re.M)


def test_a_port_that_is_none_is_refused_before_anything_is_read(appliance, model, own_state):
    for port in (99999, -1, 0):
        said = appliance("up", "--model", model, "--port", port, "--dry-run")
        assert said.code == 2 and "Invalid value for '--port'" in said.err
    assert not own_state.exists()


def test_a_pid_that_belongs_to_somebody_else_now_is_not_ours(own_process, standin, state, model,
                                                             own_state):  # fmt: skip
    assert own_process("up", "--model", model, "--detach").code == 0
    assert own_process("down").code == 0
    # As after a reboot: the file says it serves, and the numbers are those of other processes.
    last = state().model_copy(update={"phase": "ready", "supervisor_pid": os.getpid(),
                                      "engine_pid": os.getppid()})  # fmt: skip
    Files.of(own_state).state.write_text(last.model_dump_json())
    assert "is gone without a word" in own_process("status").out
    assert own_process("down").code == 0
    assert process.identity(os.getppid()) is not None


def test_ctrl_c_in_the_foreground_drains_and_exits_130(standin, state, model, own_state):
    files = Files.of(own_state)
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    files.folder.mkdir(mode=0o700)
    started = process.spawn([sys.executable, "-m", "appliance.cli", "up", "--model", str(model)],
                            environment=environment, log=own_state / "up.log")  # fmt: skip
    deadline = time.monotonic() + 90
    while (state() is None or state().phase != "ready") and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(started.pid, signal.SIGINT)
    assert started.wait(90) == 130
    assert state().phase == "stopped" and not state().engine_is_running
    assert "every accepted request finished" in (own_state / "up.log").read_text()


def test_logs_before_anything_ran_say_how_to_start(appliance):
    said = appliance("logs")
    assert said.code == 1 and "appliance up" in said.err
