"""The one door to subprocess outside preflight: start, recognise and end a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def spawn(
    argv: Sequence[str], *, environment: Mapping[str, str], log: Path, folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start argv in its own session, so a Ctrl-C in the terminal reaches only its supervisor.

    stdout and stderr are appended to `log` (made with mode 0600), stdin is empty.
    Raises OSError where the program cannot be started or the log cannot be opened.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            list(argv),
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)


def identity(pid: int) -> str | None:
    """Boot and start time of a running process: tells it from a later one with the same number.

    None where there is no such process, or only its unreaped remains. Source: proc(5), stat.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        return None
    # The command's name may hold spaces and brackets: count from the last one.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def is_running(pid: int, expected_identity: str) -> bool:
    return identity(pid) == expected_identity


def end(pid: int, expected_identity: str, patience_seconds: float) -> bool:
    """SIGTERM to the leader of a session we started, SIGKILL to its whole group when time is up.

    The leader alone gets SIGTERM: it ends its own workers in order. What is left afterwards is
    killed. True where nothing had to be killed while the leader was still there.
    """
    now = identity(pid)
    if now not in (None, expected_identity):
        return True  # the number belongs to somebody else: the group it named is long empty
    if now is None:
        _signal_group(pid, signal.SIGKILL)
        return True
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    ended = wait_gone(pid, expected_identity, patience_seconds)
    _signal_group(pid, signal.SIGKILL)
    return ended or (wait_gone(pid, expected_identity, 10.0) and False)


def wait_gone(pid: int, expected_identity: str, seconds: float) -> bool:
    """True as soon as the process has ended, False where it still runs after `seconds`."""
    deadline = time.monotonic() + seconds
    while is_running(pid, expected_identity):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _signal_group(group: int, number: signal.Signals) -> None:
    # A group outlives its leader; its number is not given to a new process before it is empty.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
