"""How a probe asks: an answer or None, and a note of every question that was refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from preflight.answers import MISSING, NOT_RECORDED, Ran, Source, Unreadable
from preflight.host import Unread
from preflight.nvml import FUNCTION_NOT_FOUND, NOT_SUPPORTED

# Not there is an answer of its own: most machines lack most files.
ORDINARY = {MISSING, NOT_RECORDED}


class Looking:
    """Wraps a Source; `unread` collects what was refused, for Host.unread."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.unread: list[Unread] = []
        # Whether some NVML function is missing from this library or this nvidia-ml-py.
        self.no_such_call = False
        self._started: dict[tuple[str, ...], Future[Ran]] = {}

    def text(self, path: str) -> str | None:
        """The stripped text of a file, or None."""
        try:
            return self.source.read(path).strip()
        except Unreadable as error:
            self._refused(path, error)
            return None

    def number(self, path: str) -> int | None:
        """A file that holds one decimal number; None where it holds anything else."""
        return whole(self.text(path))

    def names(self, path: str) -> tuple[str, ...] | None:
        """What a folder holds, or None where it is not there."""
        try:
            return self.source.names(path)
        except Unreadable as error:
            self._refused(path, error)
            return None

    def target(self, path: str) -> str | None:
        try:
            return self.source.target(path)
        except Unreadable as error:
            self._refused(path, error)
            return None

    def binary(self, path: str) -> bytes | None:
        try:
            return self.source.binary(path)
        except Unreadable as error:
            self._refused(path, error)
            return None

    @contextmanager
    def ahead(self, *commands: tuple[str, ...]) -> Iterator[None]:
        """Start these commands at once: together they take as long as the slowest of them."""
        with ThreadPoolExecutor(max(1, len(commands))) as pool:
            self._started = {argv: pool.submit(self.source.run, *argv) for argv in commands}
            yield

    def run(self, *argv: str) -> Ran | None:
        """What a command printed, or None where it is not installed or does not answer."""
        try:
            started = self._started.get(argv)
            return started.result() if started else self.source.run(*argv)
        except Unreadable as error:
            self._refused(" ".join(argv), error)
            return None

    def trial(self, what: str, *words: str) -> str | None:
        try:
            return self.source.trial(what, *words)
        except Unreadable as error:
            self._refused(what, error)
            return None

    def nvml(self, call: str, devices: tuple[int, ...] = (), *args: int) -> Any:
        """NVML's answer, or None; a call the card does not support is nothing to note."""
        try:
            return self.source.nvml(call, devices, *args)
        except Unreadable as error:
            if error.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                return None
            self._refused(call, error)
            return None

    def _refused(self, what: str, error: Unreadable) -> None:
        if error.reason not in ORDINARY:
            self.unread.append(Unread(what=what, reason=error.reason))


def whole(text: str | None) -> int | None:
    """A decimal number, or None for anything else: `max`, `N/A`, nothing."""
    text = (text or "").strip()
    return (
        int(text) if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() else None
    )


def ids(text: str | None) -> frozenset[int] | None:
    """A list such as `0-15,32` or `0-62:2`: its numbers; `` is none; None if it is not a list."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        span, _, step = part.partition(":")
        first, dash, last = span.partition("-")
        a, b = whole(first), whole(last) if dash else whole(first)
        by = whole(step) if step else 1
        if a is None or b is None or not by or a < 0 or b < a or b - a > 1 << 20 or by < 0:
            return None
        found.update(range(a, b + 1, by))
    return frozenset(found)


def as_list(numbers: list[int]) -> str | None:
    """[0, 1, 2, 5] -> `0-2,5`; nothing -> None."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or None


def keyed_kib(text: str | None) -> dict[str, int]:
    """Lines `Name:   123 kB` as bytes; a line without a number is left out."""
    found: dict[str, int] = {}
    for line in (text or "").splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        value = whole(words[0]) if colon and words else None
        if value is not None:
            found[name.split()[-1]] = value * 1024 if words[1:] == ["kB"] else value
    return found
