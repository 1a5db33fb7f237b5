"""Knowing a process from a later one with its number, and ending a whole group."""

import os
import signal
import sys
import time

import pytest

from appliance import process

WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def parent(tmp_path):
    """A process in its own session with a child of its own: (its Popen, the child's pid)."""
    log = tmp_path / "log"
    started = process.spawn([sys.executable, "-c", WITH_CHILD], environment=os.environ, log=log)
    while not log.read_text().endswith("\n"):
        time.sleep(0.01)
    yield started, int(log.read_text())
    process.end(started.pid, process.identity(started.pid) or "", 0.0)
    started.wait()


def test_an_identity_is_stable_and_no_other_processs(parent):
    pid = parent[0].pid
    assert process.identity(pid) == process.identity(pid)
    assert process.identity(pid) != process.identity(os.getpid())
    assert process.is_running(pid, process.identity(pid))
    assert not process.is_running(pid, process.identity(os.getpid()))


def test_what_has_ended_has_no_identity_even_before_it_is_reaped(parent):
    started, _ = parent
    started.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while process.identity(started.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.identity(started.pid) is None


def test_ending_the_leader_ends_what_it_left_behind(parent):
    started, child = parent
    process.end(started.pid, process.identity(started.pid), 5.0)
    deadline = time.monotonic() + 10
    while process.identity(child) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.identity(child) is None


def test_a_process_that_only_has_the_number_of_ours_is_left_alone(parent):
    started, child = parent
    process.end(started.pid, "another boot:1", 0.0)
    assert process.identity(started.pid) is not None and process.identity(child) is not None


def test_after_a_reboot_a_group_of_the_same_number_is_left_alone(parent):
    """Its leader has ended, as those of daemons do: nothing of it has the recorded number."""
    started, child = parent
    _, _, start = process.identity(started.pid).partition(":")
    started.send_signal(signal.SIGKILL)
    started.wait()
    process.end(started.pid, f"5c1f1cf5-93bd-4f2b-b3d5-2b9ad2d29e2f:{start}", 0.0)
    time.sleep(0.3)
    assert process.identity(child) is not None
    process.end(started.pid, process.identity(os.getpid()).partition(":")[0] + f":{start}", 0.0)
    deadline = time.monotonic() + 10
    while process.identity(child) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.identity(child) is None
