"""`--profile metrics` for real: Prometheus scrapes, its rules load, every panel has an answer."""

import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PORT = os.environ.get("PROMETHEUS_PORT", "9090")
FILES = ("-p", "appliance-metrics", "-f", "compose.yaml", "-f", "image/tests/metrics.yaml")
SCRAPES_SECONDS = 75
# What a fresh, healthy demo has nothing of, rightly.
EMPTY = {"Collectors that fail"}


def compose(*arguments: str) -> str:
    done = subprocess.run(["docker", "compose", *FILES, *arguments], cwd=REPOSITORY, text=True,
                          capture_output=True, check=False, timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ask(path: str, **query: str):
    url = f"http://127.0.0.1:{PORT}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())["data"]


def chat(key: str, number: int) -> None:
    port = os.environ.get("APPLIANCE_PORT", "8000")
    body = {"model": "demo", "prompt": f"{number} and on", "max_tokens": 16}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions",
                                     json.dumps(body).encode(), headers)  # fmt: skip
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


@pytest.fixture(scope="module")
def prometheus():
    """Prometheus after a minute of traffic."""
    compose("up", "-d", "--no-deps", "demo", "prometheus")
    try:
        compose("up", "--wait", "--no-deps", "demo")
        key = compose("exec", "-T", "demo", "cat", "/var/lib/appliance/keys").strip()
        end, number = time.monotonic() + SCRAPES_SECONDS, 0
        while time.monotonic() < end:
            chat(key, number)
            number += 1
            time.sleep(1)
        yield
    finally:
        compose("--profile", "demo", "--profile", "metrics", "down", "--volumes")


def test_the_appliance_is_scraped(prometheus):
    (target,) = ask("targets")["activeTargets"]
    assert target["health"] == "up" and target["labels"]["job"] == "moe-appliance"


def test_every_rule_is_loaded_and_none_fires_on_a_healthy_appliance(prometheus):
    groups = ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 9 and {rule["health"] for rule in rules} == {"ok"}
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    # This machine is not one to serve on, which preflight says.
    assert firing <= {"AppliancePreflightFailed"}, firing


def panels() -> list[tuple[str, str]]:
    dashboard = json.loads((REPOSITORY / "helm" / "monitoring" / "appliance.json").read_text())
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"]
            for target in panel["targets"]]  # fmt: skip


@pytest.mark.parametrize(("title", "expression"), panels())
def test_every_panel_has_something_to_show(prometheus, title, expression):
    found = ask("query", query=expression)["result"]
    assert bool(found) != (title in EMPTY), f"{expression}: {found}"
