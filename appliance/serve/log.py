"""The engine's log: its last lines, and the one line of them that says what went wrong."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from appliance.errors import ServeError

# (EngineCore pid=12) ERROR 11-29 16:43:35 [core.py:1234] ValueError: ...
_PREFIX = re.compile(
    r"^(\(.{1,80}? pid=\d+\)\s*)?((ERROR|WARNING|INFO|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\]\s*)?"
)
_EXCEPTION = re.compile(
    r"^([A-Za-z_]\w*\.)*(?P<name>\w*(Error|Exception|Exit|Interrupt)|DoesNotFit|CheckFailed)"
    r"(: (?P<text>.+))?$"
)
# A warning with a traceback is of something that went on all the same.
_WARNING = re.compile(r"^(\(.{1,80}? pid=\d+\)\s*)?WARNING ")
_DEATH = re.compile(r"Worker proc (?P<name>\S+) died unexpectedly")
# What one process says about the death of another: never the cause.
_CONSEQUENCES = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineCore encountered an issue",
    "Executor failed",
    "EngineDeadError",
    "cancelled",
)
# Python's resource tracker, when what it tracked went with the process that died.
_NOISE = ("KeyError: '/psm_", "KeyError: '/mp-", "KeyError: '/loky-")
_TAIL_BYTES = 256 << 10


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log; none where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-lines:] if lines > 0 else []


def cause(path: Path) -> str | None:
    """The last exception that is no mere consequence, as `Name: text`.

    Else the worker that died without a word, else the last consequence; None where there is none.
    """
    consequence = death = None
    for line in reversed(tail(path, 5000)):
        if _WARNING.match(line):
            continue
        if silent := _DEATH.search(line):
            death = death or f"{silent['name']} died without a word: it was killed, or crashed"
        plain = _PREFIX.sub("", line, count=1)
        match = _EXCEPTION.match(plain)
        if match is None or plain.startswith(_NOISE):
            continue
        text = match["text"]
        found = match["name"] if text is None else f"{match['name']}: {text}"[:600]
        if not any(words in plain for words in _CONSEQUENCES):
            return found
        consequence = consequence or found
    return death or consequence


def last_error(path: Path, otherwise: str) -> ServeError:
    """What a command of ours said last, as it said it: its `error:` and `  fix:` lines."""
    lines = tail(path, 500)
    said = [at for at, line in enumerate(lines) if line.startswith("error: ")]
    if not said:
        return ServeError(otherwise, fix=f"read {path}")
    message, fix = [], None
    for line in lines[said[-1] :]:
        if line.startswith("  fix: "):
            fix = line.removeprefix("  fix: ")
            break
        message.append(line)
    return ServeError("\n".join(message).removeprefix("error: "), fix=fix)


def exit_words(code: int, doing: str | None = None) -> str:
    """`exited with status 1 while starting`, or what signal ended it and what usually sends it."""
    when = f" while {doing}" if doing else ""
    if code >= 0:
        return f"exited with status {code}{when}"
    name = signal.Signals(-code).name
    hint = " (the kernel does that when memory runs out: see dmesg)" if name == "SIGKILL" else ""
    return f"was ended by {name}{when}{hint}"
