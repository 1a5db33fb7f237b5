"""Servers with known timing, each in its own process."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SERVER = Path(__file__).resolve().parents[2] / "timed_server.py"
Serve = Callable[[float, float], str]


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[Serve]:
    """Start a server: milliseconds between tokens, and to the first; its URL."""
    started: list[subprocess.Popen[bytes]] = []

    def serve(interval_ms: float, first_ms: float) -> str:
        port_file = tmp_path / f"port{len(started)}"
        command = [sys.executable, str(SERVER), str(port_file), str(interval_ms), str(first_ms)]
        started.append(subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}))
        until = time.monotonic() + 30
        while not (port_file.exists() and port_file.read_text()):
            assert time.monotonic() < until, "the server did not start in 30 s"
            time.sleep(0.02)
        return f"http://127.0.0.1:{port_file.read_text()}/v1"

    yield serve
    for process in started:
        process.terminate()
        process.wait(10)
