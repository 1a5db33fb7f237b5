"""The agent over HTTP, before there is an engine."""

import json
import urllib.error
import urllib.request

import pytest

from appliance.agent import Agent
from appliance.errors import ServeError
from appliance.serve.client import ask_agent
from appliance.serve.state import Files


def get(agent: Agent, path: str) -> tuple[int, dict, dict]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{agent.port}{path}", timeout=5) as answer:
            return answer.status, json.loads(answer.read()), dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), dict(error.headers)


@pytest.fixture
def agent(tmp_path):
    with Agent(Files.of(tmp_path), ("127.0.0.1", 0), 5.0, lambda agent: "x 1\n") as made:
        yield made


def test_before_there_is_an_engine_it_is_alive_not_ready_and_says_at_which_step_it_is(agent):
    agent.step = "preflight"
    assert get(agent, "/healthz")[0] == 200
    assert get(agent, "/livez")[0] == 200
    status, body, headers = get(agent, "/readyz")
    assert status == 503 and body["phase"] == "preflight" and headers["Retry-After"] == "5"


def test_a_held_failure_counts_as_started_but_never_as_ready_and_says_why(agent):
    agent.last_finding = "preflight failed: no GPU was seen"
    assert get(agent, "/startz")[0] == 503
    agent.held = True
    assert get(agent, "/startz")[0] == 200
    status, body, _ = get(agent, "/readyz")
    assert status == 503 and body["message"] == "preflight failed: no GPU was seen"


def test_metrics_are_text_and_unknown_routes_are_not_found(agent):
    with urllib.request.urlopen(f"http://127.0.0.1:{agent.port}/metrics", timeout=5) as answer:
        assert answer.read() == b"x 1\n"
    assert get(agent, "/v1/models")[0] == 404


def test_a_port_that_is_taken_is_one_sentence_with_the_setting(agent, tmp_path):
    with pytest.raises(ServeError, match=r"cannot listen on .*: Address already in use") as caught:
        Agent(Files.of(tmp_path), ("127.0.0.1", agent.port), 45.0)
    assert "APPLIANCE_AGENT_PORT" in caught.value.fix


def test_nobody_on_the_health_port_is_one_sentence(tmp_path):
    with pytest.raises(ServeError, match=r"nothing answers on the health port 127\.0\.0\.1:1"):
        ask_agent("127.0.0.1", 1)
