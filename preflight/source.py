"""The three doors to a machine: Live, Recorded and Recording. The only user of subprocess here."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from preflight.answers import MISSING, NOT_RECORDED, Ran, Source, Unreadable
from preflight.blank import Blanker
from preflight.nvml import Nvml
from preflight.trials import TRIALS

RECORDING = "recording.json"
FORMAT = 1
OURS = ("/proc/self/", "/sys/fs/cgroup", "/dev/shm", "/.dockerenv", "/run/.containerenv")
COMMAND_SECONDS = 4
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
    try:
        found = os.statvfs(live.at(path))
    except OSError as error:
        raise _reason(error) from error
    return [found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize]


def _run(live: Live, *argv: str) -> list[Any]:
    """nvidia-smi and docker talk to this machine's driver and daemon, whatever `root` is."""
    environment = {"PATH": os.defpath + ":/usr/sbin:/sbin:/usr/local/bin", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            argv, capture_output=True, timeout=COMMAND_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unreadable(f"{argv[0]} did not answer within {COMMAND_SECONDS} s") from None
    except OSError as error:
        raise _reason(error) from error
    out = done.stdout.decode("utf-8", "replace") + done.stderr.decode("utf-8", "replace")
    return list(Ran(done.returncode, out))


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


class Recorded(Source):
    """A machine kept in a folder by Recording: the same questions get the same answers."""

    def __init__(self, folder: Path) -> None:
        path = folder / RECORDING
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise Unreadable(f"{path}: {error.strerror}", error.errno) from error
        except ValueError as error:
            raise Unreadable(f"{path} is not a recording: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise Unreadable(f"{path} has recording format {found!r}; this release reads {FORMAT}")
        self.label = data.get("label")
        self.folders = data.get("folders")
        self.answers: dict[str, dict[str, Any]] = data["answers"]

    def answer(self, kind: str, *words: str) -> Any:
        found = self.answers.get(kind, {}).get(" ".join(words))
        if found is None and kind == "names":
            found = self._names(words[0])
        if found is None:
            raise Unreadable(NOT_RECORDED)
        return _as_answered(kind, found)

    def _names(self, folder: str) -> list[str] | None:
        """A machine composed by hand lists files only; what they share is its folders."""
        start = folder.rstrip("/") + "/"
        kinds = ("read", "target", "binary", "names")
        paths = (p for kind in kinds for p in self.answers.get(kind, {}) if p.startswith(start))
        return sorted({path[len(start) :].split("/")[0] for path in paths}) or None


class Recording(Source):
    """Asks another source, blanks what identifies the machine, and keeps question and answer.

    Probes see the blanked answers, so a replay gives the same report, byte for byte.
    """

    def __init__(self, live: Source, folder: Path) -> None:
        self.live = live
        self.folder = folder
        self.label = live.label
        self.answers: dict[str, dict[str, Any]] = {}
        self.blank = Blanker(_hostname(live))

    def answer(self, kind: str, *words: str) -> Any:
        kept = self.answers.setdefault(kind, {})
        key = " ".join(words)
        if key in kept:
            # Free memory changes between two looks; a report has only one value of it.
            return _as_answered(kind, kept[key])
        try:
            found = self.blank.answer(kind, words, self.live.answer(kind, *words))
        except Unreadable as error:
            kept[key] = {"unreadable": self.blank.text(error.reason)}
            if error.code is not None:
                kept[key]["code"] = error.code
            raise
        kept[key] = _as_kept(kind, found)
        return found

    def save(self) -> Path:
        """Write the recording; the folder is made if it is not there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / RECORDING
        data = {
            "format": FORMAT,
            "label": self.label,
            "folders": self.folders,
            "answers": self.answers,
        }
        aside = path.with_name(f".{path.name}.new")
        aside.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        aside.replace(path)
        return path


def _as_kept(kind: str, found: Any) -> Any:
    """Texts of several lines as lists, so that a recording can be read and its changes reviewed."""
    if kind == "run":
        return {"code": found[0], "out": found[1].split("\n")}
    if isinstance(found, str) and found.count("\n") > 1:
        return {"lines": found.split("\n")}
    return found


def _as_answered(kind: str, kept: Any) -> Any:
    """The inverse of _as_kept; a kept refusal is raised again."""
    if isinstance(kept, dict) and "unreadable" in kept:
        raise Unreadable(kept["unreadable"], kept.get("code"))
    if isinstance(kept, dict) and "lines" in kept:
        return "\n".join(kept["lines"])
    if kind == "run":
        return [kept["code"], "\n".join(kept["out"])]
    return kept


def _hostname(live: Source) -> str | None:
    try:
        return live.read("/proc/sys/kernel/hostname").strip() or None
    except Unreadable:
        return None
