"""TLS on the real engine: our commands trust its certificate, and nothing is said in the clear."""

import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

PORT = 8461
PROMPT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


def appliance(state: Path, *words: object) -> str:
    settings = {"APPLIANCE_STATE_DIR": str(state), "APPLIANCE_TLS": "generated"}
    done = subprocess.run(
        [sys.executable, "-m", "appliance.cli", *map(str, words)],
        env={**os.environ, **settings, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    state = tmp_path_factory.mktemp("tls") / "state"
    try:
        appliance(state, "weights", "synth", state.parent / "demo")
        served = ("--model", state.parent / "demo", "--context", 2048, "--streams", 4)
        appliance(state, "up", "--detach", *served, "--port", PORT)
        yield state
    finally:
        appliance(state, "down")


def chat(url: str, key: str, trusted: ssl.SSLContext | None) -> dict:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(PROMPT).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60, context=trusted) as answer:
        return json.loads(answer.read())


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_the_engine_answers_over_tls_to_who_trusts_its_certificate_and_to_nobody_else(serving):
    status = json.loads(appliance(serving, "status", "--json"))
    assert status["serving"] and status["phase"] == "unproved", "no known answers were made: faster"
    key = (serving / "keys").read_text().strip()
    own = ssl.create_default_context(cafile=str(serving / "tls.crt"))
    secure = f"https://127.0.0.1:{PORT}"
    assert chat(secure, key, own)["usage"]["completion_tokens"] == 8
    with pytest.raises(urllib.error.HTTPError, match="401"):
        chat(secure, "not-the-key", own)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        chat(secure, key, ssl.create_default_context())
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        chat(f"http://127.0.0.1:{PORT}", key, None)
    appliance(serving, "canary", "127.0.0.1", PORT)  # exit code 0: two greedy answers agree
