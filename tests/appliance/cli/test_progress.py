"""Progress: a bar on a terminal, plain lines elsewhere."""

import os
import pty
import subprocess
import sys

import pytest

from appliance.render import Progress

SHOW = """
import time
from appliance.render import Progress
with Progress("loading", 4.0) as progress:
    time.sleep(1.5)
    progress.detail = "shard 2"
    progress.advance(3, 4)
    time.sleep(0.6)
"""


def on_a_terminal(code: str) -> str:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environment, check=True,
                   timeout=60)  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return shown.decode()


def test_on_a_terminal_a_bar_follows_the_clock_and_then_what_it_is_told():
    frames = on_a_terminal(SHOW).split("\r\x1b[2K")
    assert any("loading" in frame and "s of about 4.0 s" in frame for frame in frames)
    told = [frame for frame in frames if "75%" in frame]
    assert told and all("█" * 18 + "·" * 6 in frame for frame in told)
    assert any(frame.endswith("shard 2") for frame in told)
    assert frames[-1].startswith("loading: 2.") and frames[-1].endswith("s\r\n")


def test_elsewhere_there_are_two_plain_lines(capfd):
    with Progress("planning"):
        pass
    assert capfd.readouterr().err == "planning\n  planning: 0.0 s\n"


def test_a_failure_is_said_to_be_one(capfd):
    with pytest.raises(ValueError, match="no"), Progress("planning"):
        raise ValueError("no")
    assert capfd.readouterr().err.endswith("  planning: failed after 0.0 s\n")
