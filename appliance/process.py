"""The one door to subprocess outside preflight: start, recognise and end a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
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


def run(argv: Sequence[str], *, environment: Mapping[str, str], log: Path) -> int:
    """Run argv to its end, its output in `log` alone: the exit code, negative for a signal.

    Where the wait is broken off (Ctrl-C), the process is ended first.
    """
    log.unlink(missing_ok=True)
    child = spawn(argv, environment=environment, log=log)
    try:
        return child.wait()
    finally:
        if child.poll() is None:
            end(child.pid, identity(child.pid) or "", 2.0)
            child.wait()


def output(
    argv: Sequence[str], *, environment: Mapping[str, str], limit_seconds: float
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a short command. Raises OSError where it cannot be started
    and TimeoutError where it takes longer; it is ended then."""
    try:
        done = subprocess.run(
            list(argv), env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=limit_seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{argv[0]} did not end within {limit_seconds:.0f} s") from error
    return done.returncode, done.stdout, done.stderr


def identity(pid: int) -> str | None:
    """Boot and start time of a running process: tells it from a later one with the same number.

    None where there is no such process, or only its unreaped remains. Source: proc(5), stat.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        boot = _boot()
    except OSError:
        return None
    # The command's name may hold spaces and brackets: count from the last one.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"


def _boot() -> str:
    return _BOOT_ID.read_text().strip()


def is_running(pid: int, expected_identity: str) -> bool:
    return identity(pid) == expected_identity


def end(
    pid: int,
    expected_identity: str,
    patience_seconds: float,
    *,
    hurry: Callable[[], bool] = lambda: False,
) -> None:
    """SIGTERM to the leader of a session we started; SIGKILL to its group when patience is over.

    The leader alone gets SIGTERM: it ends its own workers in order. What is left is killed, at
    once where `hurry()` comes true.
    """
    now = identity(pid)
    if now not in (None, expected_identity):
        return  # the number belongs to somebody else: the group it named is long empty
    if expected_identity and expected_identity.partition(":")[0] != _boot():
        return  # before a reboot: a group of that number now has nothing to do with us
    if now is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        _wait_gone(pid, expected_identity, patience_seconds, hurry)
    _signal_group(pid, signal.SIGKILL)
    # A process in the kernel's hands (pinning, a stuck disk) takes its time to die.
    _wait_gone(pid, expected_identity, 10.0, lambda: False)


def _wait_gone(
    pid: int, expected_identity: str, seconds: float, give_up: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid, expected_identity) and time.monotonic() < deadline and not give_up():
        time.sleep(0.05)


def _signal_group(group: int, number: signal.Signals) -> None:
    # A group outlives its leader; its number is not given to a new process before it is empty.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
