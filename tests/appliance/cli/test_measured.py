"""What is measured and asked of an appliance that speaks TLS, and of one behind no proxy."""

import asyncio
import json
import os
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from machines import machine
from plan_builders import deepseek_v41_flash

from appliance import process
from appliance.accuracy.run import SAMPLING, Server
from appliance.bench.client import ask
from appliance.cli.measured import find
from appliance.errors import ServeError
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from appliance.serve.state import Files, State, make_folder, write_state

HI = [{"role": "user", "content": "hello"}]


class Chat(BaseHTTPRequestHandler):
    """Says "yes": at once, or as a stream of events. `cut` promises more than it sends."""

    cut = False

    def do_GET(self) -> None:
        self.answer("application/json", b'{"ranks": []}')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("stream"):
            choice = {"index": 0, "delta": {"content": "yes"}, "finish_reason": None}
            event = json.dumps({"choices": [choice]})
            self.answer("text/event-stream", f"data: {event}\n\ndata: [DONE]\n\n".encode())
        else:
            choice = {"message": {"content": "yes"}, "finish_reason": "stop"}
            self.answer("application/json", json.dumps({"choices": [choice]}).encode())

    def answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) + self.cut))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serving():
    """serving(context=None, cut=False) -> the port of a server, ended with the test."""
    servers = []

    def start(context: ssl.SSLContext | None = None, *, cut: bool = False) -> int:
        made = ThreadingHTTPServer(("127.0.0.1", 0), type("Chat", (Chat,), {"cut": cut}))
        if context is not None:
            made.socket = context.wrap_socket(made.socket, server_side=True)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        servers.append(made)
        return made.server_port

    yield start
    for made in servers:
        made.shutdown()
        made.server_close()


@pytest.fixture
def certificate(tmp_path) -> tuple[Path, Path]:
    crt, key = tmp_path / "a.crt", tmp_path / "a.key"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
                    "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=a",
                    "-keyout", str(key), "-out", str(crt)], check=True, capture_output=True,
                   timeout=60)  # fmt: skip
    return crt, key


def test_an_appliance_that_speaks_tls_is_measured_and_asked_by_its_own_certificate(
    serving, certificate, tmp_path, monkeypatch
):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    files = Files.of(tmp_path / "state")
    make_folder(files)
    made = plan(machine("two-rtx-pro-6000-healthy"), deepseek_v41_flash(), None, Policy())
    made.write(files.plan)
    files.keys.write_text("sk-a\n")
    files.control_key.write_text("control\n")
    write_state(files, State(
        phase="ready", since=0.0, supervisor_pid=os.getpid(),
        supervisor_identity=process.identity(os.getpid()), host="127.0.0.1",
        port=serving(context), model=tmp_path, served_name="a", plan=files.plan,
        plan_digest=made.digest, log=files.engine_log, keys=files.keys,
        expected_load_seconds=1.0, certificate=certificate[0],
    ))  # fmt: skip
    monkeypatch.setenv("APPLIANCE_STATE_DIR", str(files.folder))
    endpoint = find(None, None, None, ignore_eos=True).endpoint
    answer = asyncio.run(ask(endpoint, HI, 1))
    assert (answer.error, answer.text) == (None, "yes")
    server = Server(endpoint.url, endpoint.key, tls=endpoint.tls)
    assert server.ask("a", "hello", SAMPLING)["answer"] == "yes"
    with pytest.raises(ServeError, match="certificate verify failed"):
        Server(endpoint.url, endpoint.key).ask("a", "hello", SAMPLING)


def test_what_serves_on_this_host_is_asked_past_any_proxy(serving, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server(f"http://127.0.0.1:{serving()}/v1", "sk-a")
    assert server.ask("a", "hello", SAMPLING)["answer"] == "yes"


def test_an_answer_that_is_cut_off_is_a_sentence(serving):
    server = Server(f"http://127.0.0.1:{serving(cut=True)}/v1", "sk-a")
    with pytest.raises(ServeError, match="gave no answer: IncompleteRead"):
        server.ask("a", "hello", SAMPLING)
