"""The three doors to a machine: Live, Recorded and Recording. The only user of subprocess here."""

from __future__ import annotations

import errno
import os
import queue
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from preflight.answers import MISSING, Ran, Source, Unreadable
from preflight.nvml import Nvml
from preflight.recording import Recorded, Recording
from preflight.trials import TRIALS

__all__ = ["Live", "Recorded", "Recording", "run_for"]
OURS = ("/proc/self/", "/sys/fs/cgroup", "/dev/shm", "/.dockerenv", "/run/.containerenv")
COMMAND_SECONDS = 4
KILLED_SECONDS = 1  # for a command that was killed to be gone
TEXT_LIMIT_BYTES = 4 << 20
PIECE_BYTES = 32 << 10


class Live(Source):
    """This machine, asked for real.

    Facts of the machine come from under `root` (a container may have the host's /proc and /sys
    mounted there); facts of this process always come from our own /.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self._nvml = Nvml()

    def answer(self, kind: str, *words: str) -> Any:
        return ANSWERS[kind](self, *words)

    def at(self, path: str) -> Path:
        return Path(path) if path.startswith(OURS) else self.root / path.lstrip("/")

    def ask_nvml(self, call: str, *words: str) -> Any:
        return self._nvml.call(call, *words)


def _reason(error: OSError) -> Unreadable:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Unreadable(MISSING, error.errno)
    return Unreadable((error.strerror or str(error)).lower(), error.errno)


def _read(live: Live, path: str) -> str:
    # Small pieces: /proc/sys answers a read of megabytes with "cannot allocate memory".
    found = b""
    try:
        with live.at(path).open("rb", buffering=0) as file:
            while len(found) < TEXT_LIMIT_BYTES and (piece := file.read(PIECE_BYTES)):
                found += piece
    except OSError as error:
        raise _reason(error) from error
    return found.decode("utf-8", "replace")


def _names(live: Live, path: str) -> list[str]:
    try:
        return sorted(os.listdir(live.at(path)))  # noqa: PTH208 names only, no stat of each
    except OSError as error:
        raise _reason(error) from error


def _target(live: Live, path: str) -> str:
    try:
        real = live.at(path).resolve(strict=True)
    except OSError as error:
        raise _reason(error) from error
    root = live.root.resolve()
    return f"/{real.relative_to(root)}" if real.is_relative_to(root) else str(real)


def _binary(live: Live, path: str) -> str:
    try:
        with live.at(path).open("rb") as file:
            return file.read(4096).hex()
    except OSError as error:
        raise _reason(error) from error


def _space(live: Live, path: str) -> list[int]:
    """Our folders are where this process sees them; only the host's own are below `root`."""
    own = Path(path)
    try:
        found = os.statvfs(own if own.exists() else live.at(path))
    except OSError as error:
        raise _reason(error) from error
    return [found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize]


def _run(live: Live, *argv: str) -> list[Any]:
    """nvidia-smi and docker talk to this machine's driver and daemon, whatever `root` is."""
    answers: queue.SimpleQueue[subprocess.CompletedProcess[bytes] | Exception] = queue.SimpleQueue()
    # In a thread that may be left behind: a driver that hangs keeps what asks it, killed or not.
    asking = threading.Thread(target=lambda: answers.put(_answer_of(argv)), daemon=True)
    asking.start()
    try:
        done = answers.get(timeout=COMMAND_SECONDS + KILLED_SECONDS)
    except queue.Empty:
        done = subprocess.TimeoutExpired(argv, COMMAND_SECONDS)
    if isinstance(done, subprocess.TimeoutExpired):
        raise Unreadable(f"{argv[0]} did not answer within {COMMAND_SECONDS} s") from done
    if isinstance(done, OSError):
        raise _reason(done) from done
    assert isinstance(done, subprocess.CompletedProcess)
    out = done.stdout.decode("utf-8", "replace") + done.stderr.decode("utf-8", "replace")
    return list(Ran(done.returncode, out))


def _answer_of(argv: tuple[str, ...]) -> subprocess.CompletedProcess[bytes] | Exception:
    environment = {"PATH": os.defpath + ":/usr/sbin:/sbin:/usr/local/bin", "LC_ALL": "C"}
    try:
        return subprocess.run(
            argv, capture_output=True, timeout=COMMAND_SECONDS, env=environment, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return error


def run_for(argv: list[str], seconds: float) -> Ran:
    """Run a command of our own for at most `seconds`; then its whole process group is ended.

    Raises TimeoutError where it took longer, Unreadable where it cannot be started.
    """
    try:
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as child:
            try:
                out, _ = child.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                raise TimeoutError(f"{argv[0]} took more than {seconds:.0f} s") from None
    except TimeoutError:
        raise
    except OSError as error:
        raise _reason(error) from error
    return Ran(child.returncode, out.decode("utf-8", "replace"))


def _trial(live: Live, what: str, *words: str) -> str:
    try:
        return TRIALS[what](*words)
    except OSError as error:
        raise _reason(error) from error


ANSWERS: dict[str, Any] = {
    "read": _read,
    "names": _names,
    "target": _target,
    "binary": _binary,
    "space": _space,
    "run": _run,
    "nvml": Live.ask_nvml,
    "trial": _trial,
}
