"""What a check is: a row of CHECKS. It never touches the machine; it reads facts and thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from preflight.host import Gpu, Host
from preflight.needs import Needs

Severity = Literal["fail", "warn", "unknown"]
FAIL: Severity = "fail"
WARN: Severity = "warn"


class Saw(NamedTuple):
    """Something is wrong: what was seen, with its numbers; `fix` replaces the row's own."""

    text: str
    fix: str | None = None


class Unseen(NamedTuple):
    """The fact this check needs could not be read: neither wrong nor fine."""

    what: str


Result = Iterator[Saw | Unseen]


class Check(NamedTuple):
    """One row: a stable id, what is looked at, the threshold and where it comes from, the fix.

    `must_see`: a fact too important to be left unread without a warning.
    """

    id: str
    area: str
    severity: Severity
    run: Callable[[Host, Needs], Result]
    threshold: str
    source: str
    fix: str
    must_see: bool = False


def cards(host: Host, needs: Needs) -> tuple[Gpu, ...]:
    """The cards in question: those a plan names, else all. None known: none to look at."""
    if needs.device == "cpu":
        return ()
    found = host.gpus or ()
    named = tuple(gpu for gpu in found if gpu.uuid in needs.gpu_uuids)
    return named or found


def live(host: Host, needs: Needs) -> tuple[Gpu, ...]:
    """The cards in question that answer at all: a lost card has its own finding."""
    return tuple(gpu for gpu in cards(host, needs) if gpu.fault is None)


def called(gpu: Gpu) -> str:
    """`GPU 0 (0000:01:00.0)`."""
    return f"GPU {gpu.index}" + (f" ({gpu.pci_address})" if gpu.pci_address else "")


def refusal(host: Host, what: str) -> str | None:
    """Why a question that starts with `what` was refused, if it was asked in vain."""
    return next((u.reason for u in host.unread if u.what.startswith(what)), None)


def gib(size_bytes: float) -> str:
    return f"{size_bytes / (1 << 30):,.1f} GiB"


def version(text: str | None) -> tuple[int, ...] | None:
    """`580.95.05` -> (580, 95, 5); `6.8.0-87-generic` -> (6, 8, 0)."""
    numbers = []
    for part in (text or "").split("-")[0].split("."):
        if not (part.isascii() and part.isdecimal()):
            break
        numbers.append(int(part))
    return tuple(numbers) or None
