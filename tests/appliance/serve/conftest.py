"""A plan, a model folder with known answers, and a stand-in for a slow engine."""

import contextlib
import dataclasses
import json
import os
import socket
import stat
import sys
import threading
import time
from pathlib import Path

import pytest

from appliance.plan.model import MadeFrom, ModelFacts, Plan, RankPlan, Serving
from appliance.serve.spec import ServeSpec, Wishes, spec
from appliance.serve.state import Files, State, read_state
from appliance.serve.supervise import StopRequest, supervise

REPOSITORY = Path(__file__).resolve().parents[3]


def plan(**changes) -> Plan:
    rank = RankPlan(rank=0, device="cpu", link="memory", device_capacity_bytes=1 << 30,
                    ledger=(), layers=())  # fmt: skip
    fields = {
        "made_from": MadeFrom(host="h", checkpoint="c", policy="p"),
        "model": ModelFacts(family="qwen3_moe", hidden_size=256, intermediate_size=256, layers=4,
                            experts=16, top_k=4, expert_bytes=1, size_bytes=10**9),
        "tensor_parallel": 1,
        "serving": Serving(streams=4, context_tokens=2048, prefill_chunk_tokens=512,
                           kv_cache_bytes=1 << 28),
        "ranks": (rank,),
    }  # fmt: skip
    return Plan(**{**fields, **changes})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    known = {"prompt": [5, 9], "tokens": [6, 10, 6, 10], "leads": [1.0, 1.0, 1.0, 0.1]}
    kept = {"schema_version": 1, "cases": [known]}
    (folder / "expectations.json").write_text(json.dumps(kept))
    return folder


@pytest.fixture
def standin_spec(tmp_path, model) -> ServeSpec:
    """The real spec of a plan, with the stand-in where vLLM's Python would be."""
    python = tmp_path / "python"
    standin = Path(__file__).with_name("standin.py")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {standin} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    plan_path = tmp_path / "plan.json"
    plan().write(plan_path)
    wishes = Wishes(engine_python=str(python), host="127.0.0.1", port=free_port(),
                    drain_seconds=10.0)  # fmt: skip
    made = spec(plan(), model, plan_path, wishes, Files.of(tmp_path / "state"))
    return dataclasses.replace(made, start_limit_seconds=60.0)


def environment(wrong: str = "") -> dict[str, str]:
    return {**os.environ, "STANDIN": wrong, "PYTHONPATH": str(REPOSITORY)}


@dataclasses.dataclass
class Running:
    """A supervisor in a thread: what it has told, how it ended."""

    spec: ServeSpec
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)
    told: list[State] = dataclasses.field(default_factory=list)
    ended: list[State | Exception] = dataclasses.field(default_factory=list)

    def run(self, wrong: str) -> None:
        try:
            self.ended.append(supervise(self.spec, environment(wrong), self.told.append, self.stop))
        except Exception as error:  # noqa: BLE001 (shown by wait_for)
            self.ended.append(error)

    def wait_for(self, *phases: str, seconds: float = 60.0) -> State:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            state = read_state(self.spec.files)
            if state is not None and state.phase in phases:
                return state
            time.sleep(0.02)
        raise AssertionError(f"never {phases}: {self.ended or read_state(self.spec.files)}")


@pytest.fixture
def supervised(standin_spec):
    """supervised(wrong="") starts a supervisor; it is stopped and joined at the end."""
    with contextlib.ExitStack() as stack:

        def start(wrong: str = "", **changes) -> Running:
            running = Running(dataclasses.replace(standin_spec, **changes))
            thread = threading.Thread(target=running.run, args=(wrong,))

            def finish() -> None:
                running.stop.count = 2
                thread.join(60)
                assert not thread.is_alive()

            thread.start()
            stack.callback(finish)
            return running

        yield start
