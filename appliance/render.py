"""The only place that prints: data on stdout, talk on stderr, JSON for machines."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from appliance.errors import ApplianceError

WIDTH = 100
BAR_CELLS = 24
DRAW_SECONDS = 0.2
BAR_AFTER_SECONDS = 1.0  # what takes less needs no bar
LINE_EVERY_SECONDS = 30.0  # where stderr is no terminal
RATE_SECONDS = 10.0  # a rate is over so long


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 stream`, `4 streams`: see preflight.counted, which is loaded when it is needed."""
    from preflight.counted import counted as said

    return said(number, noun, plural)


def data(text: str) -> None:
    """A line on stdout: what the command was asked for."""
    print(text, flush=True)


def lines(texts: Iterable[str]) -> None:
    for text in texts:
        data(text)


def wrapped(texts: Iterable[str], hanging: int) -> list[str]:
    """Lines of at most WIDTH columns; what goes on is indented to `hanging`, or 2 past its own."""
    out: list[str] = []
    for text in texts:
        own = len(text) - len(text.lstrip())
        indent = " " * (own + 2 if own else hanging)
        out += textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return out


def piece(text: str) -> None:
    """A piece of a line on stdout, as it streams."""
    print(text, end="", flush=True)


def as_json(value: object) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False, default=str), flush=True)


def say(text: str) -> None:
    """A line on stderr: what is happening."""
    _talk(text + "\n")


def _talk(text: str) -> None:
    # Whoever listened may be gone: a journal that restarts, a terminal that was closed, a `tee`
    # that was ended. What is being done, serving for one, does not end for that.
    with contextlib.suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


def error(problem: ApplianceError) -> None:
    say(f"error: {problem.message}")
    if problem.fix is not None:
        say(f"  fix: {problem.fix}")


def size(size_bytes: int) -> str:
    """Bytes for people: `309.3 GiB`, `4.5 MiB`, `12 B`."""
    for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(size_bytes) >= 1 << scale:
            return f"{size_bytes / (1 << scale):,.1f} {unit}"
    return f"{size_bytes} B"


def duration(seconds: float) -> str:
    """`0.4 s`, `38 s`, `2 min 05 s`, `3 h 12 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


class Progress:
    """What is being done and how far it is: a bar on a terminal, plain lines elsewhere.

    The bar follows `advance(done, total)` where that is called; else the clock against
    `expected_seconds`; else only the time that has passed is shown.
    """

    def __init__(self, what: str, expected_seconds: float | None = None) -> None:
        self.what = what
        self.detail: str | None = None  # what of it is being done now
        self._expected = expected_seconds
        self._share: float | None = None
        self._started = time.monotonic()
        self._over = threading.Event()
        self._on_terminal = sys.stderr.isatty()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def advance(self, done: float, total: float) -> None:
        self._share = min(1.0, done / total) if total else None

    def __enter__(self) -> Progress:
        if not self._on_terminal:
            about = f" (about {duration(self._expected)})" if self._expected else ""
            say(f"{self.what}{about}")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        seconds = duration(time.monotonic() - self._started)
        end = f"{self.what}: {seconds}" if kind is None else f"{self.what}: failed after {seconds}"
        say(f"\r\x1b[2K{end}" if self._on_terminal else f"  {end}")

    def _draw(self) -> None:
        every = DRAW_SECONDS if self._on_terminal else LINE_EVERY_SECONDS
        while not self._over.wait(every):
            seconds = time.monotonic() - self._started
            if not self._on_terminal:
                say(f"  {self.what}: {duration(seconds)} so far")
            elif seconds >= BAR_AFTER_SECONDS:
                _talk(f"\r\x1b[2K{self._bar(seconds)}")

    def _bar(self, seconds: float) -> str:
        share = self._share
        if share is None and self._expected:
            # Time alone never says that the work is done.
            share = min(0.99, seconds / self._expected)
        detail = f"  {self.detail}" if self.detail else ""
        if share is None:
            return f"{self.what}: {duration(seconds)}{detail}"
        full = round(share * BAR_CELLS)
        cells = "█" * full + "·" * (BAR_CELLS - full)
        about = f" of about {duration(self._expected)}" if self._expected else ""
        return f"{self.what} {cells} {share:4.0%}  {duration(seconds)}{about}{detail}"


def table(rows: list[tuple[str, Any]]) -> None:
    """Name and value, aligned, on stdout; rows whose value is None are left out."""
    shown = [
        (name, f"{value:,}" if isinstance(value, int) else str(value))
        for name, value in rows
        if value is not None
    ]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        data(f"{name:<{width}}  {value}")


class ByteProgress:
    """Bytes of a transfer: done, rate, time left, and the files under way.

    A line that redraws on a terminal, a line now and then elsewhere; `json` gives one object a
    line on stderr; `quiet` gives nothing.
    """

    def __init__(self, what: str, *, quiet: bool = False, json: bool = False) -> None:
        self._what, self._quiet, self._json = what, quiet, json
        self._on_terminal = sys.stderr.isatty() and not json
        self._every = DRAW_SECONDS if self._on_terminal else 1.0 if json else LINE_EVERY_SECONDS
        self._seen: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._drawn = time.monotonic()
        self._finished = False

    def update(
        self, done: int, total: int, moved: int, files: Sequence[tuple[str, int, int]] = ()
    ) -> None:
        """`moved` counts the bytes of this run, of which the rate is made; `files`: done, size."""
        now = time.monotonic()
        self._seen.append((now, moved))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()
        last = done >= total and not self._finished
        self._finished = done >= total
        if self._quiet or not (last or now - self._drawn >= self._every):
            return
        self._drawn = now
        then, before = self._seen[0]
        rate = (moved - before) / (now - then) if now > then else 0.0
        left = (total - done) / rate if rate else None
        if self._json:
            each = [{"path": path, "done_bytes": d, "size_bytes": s} for path, d, s in files]
            found = {"done_bytes": done, "total_bytes": total, "bytes_per_second": round(rate)}
            say(json.dumps({**found, "seconds_left": left and round(left), "files": each}))
            return
        text = f"{size(done)} of {size(total)}, {size(round(rate))}/s"
        text += f", {duration(left)} left" if left else ""
        names = [f"{path.rpartition('/')[2]} {d / s:.0%}" for path, d, s in files if s][:3]
        text = f"{self._what}: {text}{'  ' if names else ''}{', '.join(names)}"
        if self._on_terminal:
            _talk(f"\r\x1b[2K{text[:120]}")
        else:
            say(f"  {text}")

    def end(self) -> None:
        if self._on_terminal and not self._quiet:
            _talk("\r\x1b[2K")
