"""Chunks of many files over several connections at once; each is hashed, written, journalled."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.errors import SourceError
from appliance.weights.manifest import chunk_span
from appliance.weights.pace import Patience, Throttle
from appliance.weights.part import Part
from appliance.weights.source import Again, FileChanged, RangeRefused, Source

OBSERVE_SECONDS = 0.2
ENDING_SECONDS = 2.0  # a connection that stalls does not hold up Ctrl-C
WRONG_BYTES_LIMIT = 3


@dataclass(frozen=True, slots=True)
class Transfer:
    """How to fetch: connections, a limit in bytes a second, tries without progress, first pause.

    `told`: a sentence whenever something is tried again before bytes flow (then: Moment.trouble).
    """

    connections: int = 8
    bytes_per_second: int | None = None
    tries: int = 8
    first_pause_seconds: float = 0.5
    told: Callable[[str], None] = lambda text: None

    @property
    def patience(self) -> Patience:
        return Patience(self.tries, self.first_pause_seconds, self.told)


@dataclass(frozen=True, slots=True)
class Moment:
    """How far a transfer is. `done_bytes` counts what was there before; `files` those under way.

    `trouble` is why nothing came lately, if so.
    """

    done_bytes: int
    total_bytes: int
    fetched_bytes: int
    files: tuple[tuple[str, int, int], ...]  # path, done bytes, size
    trouble: str | None = None


Observe = Callable[[Moment], None]


class _Stopped(Exception):
    pass


class Fetch:
    """One run over `parts`. Afterwards every part is in the store, or `run` has raised.

    `fetched_bytes` counts all that came over the wire, again or not.
    """

    def __init__(self, source: Source, parts: Sequence[Part], transfer: Transfer) -> None:
        self._source = source
        self._transfer = transfer
        self._throttle = Throttle(transfer.bytes_per_second)
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._open = {id(part): part for part in parts}
        self._done = {id(part): part.done_bytes for part in parts}
        self._total = sum(part.wanted.size_bytes for part in parts)
        self._jobs: deque[tuple[Part, int | None]] = deque()
        for part in parts:
            self._queue(part)
        self._problem: BaseException | None = None
        self._finished_bytes = 0
        self._trouble: str | None = None
        self.fetched_bytes = 0

    def run(self, observe: Observe) -> None:
        """Raises the first error; what is complete stays, and the next run goes on from there."""
        threads = [
            threading.Thread(target=self._work, daemon=True)
            for _ in range(max(1, self._transfer.connections))
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                with self._changed:
                    self._changed.wait(OBSERVE_SECONDS)
                observe(self.moment())
        finally:
            self._stop.set()
            with self._changed:
                self._changed.notify_all()
            end = time.monotonic() + ENDING_SECONDS
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
        if self._problem is not None:
            raise self._problem
        observe(self.moment())

    def moment(self) -> Moment:
        with self._changed:
            under_way = tuple(
                (part.wanted.path, self._done[key], part.wanted.size_bytes)
                for key, part in self._open.items()
                if self._done[key]
            )
            done = self._finished_bytes + sum(self._done[key] for key in self._open)
            return Moment(done, self._total, self.fetched_bytes, under_way, self._trouble)

    def _queue(self, part: Part) -> None:
        """All that the file still misses; a file that misses nothing only has to be proved."""
        missing: list[int | None] = [*part.missing]
        self._jobs.extend((part, index) for index in missing or [None])

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                part, index = job
                if index is None or self._fetch(part, index):
                    self._finish(part)
                else:
                    part.follow()
        except _Stopped:
            pass
        except BaseException as problem:  # noqa: BLE001  handed to the caller of run
            with self._changed:
                self._problem = self._problem or problem
            self._stop.set()
        finally:
            with self._changed:
                self._changed.notify_all()

    def _next(self) -> tuple[Part, int | None] | None:
        with self._changed:
            # A file that turns out wrong comes back into the queue: wait while any is open.
            while not self._jobs and self._open and not self._stop.is_set():
                self._changed.wait(OBSERVE_SECONDS)
            return self._jobs.popleft() if self._jobs and not self._stop.is_set() else None

    def _finish(self, part: Part) -> None:
        finished = part.finish()
        with self._changed:
            if finished:
                del self._open[id(part)]
                self._finished_bytes += part.wanted.size_bytes
            else:
                self._done[id(part)] = part.done_bytes
                self._queue(part)
            self._changed.notify_all()

    def _fetch(self, part: Part, index: int) -> bool:
        """One chunk into its place. True if it was the last that the file missed."""
        start, stop = chunk_span(part.wanted.size_bytes, index)
        expected = part.wanted.chunks[index] if part.wanted.chunks is not None else None
        patience = Patience(self._transfer.tries, self._transfer.first_pause_seconds)
        for _ in range(WRONG_BYTES_LIMIT):
            digest = self._bytes(part, start, stop, patience)
            if expected in (None, digest):
                return part.add(index, digest)
            self._count(part, start - stop, 0)
        raise SourceError(
            f"{part.wanted.path}, bytes {start:,} to {stop - 1:,}: the source sent the wrong bytes "
            f"{WRONG_BYTES_LIMIT} times (sha256 {digest}, expected {expected})",
            fix="the source is damaged or lies: use another one",
        )

    def _bytes(self, part: Part, start: int, stop: int, patience: Patience) -> str:
        """Write bytes start..stop-1, going on after a broken connection; gives their sha256."""
        digest, position = hashlib.sha256(), start
        while position < stop:
            try:
                with self._source.read(part.wanted, position, stop) as found:
                    part.check_tag(found.tag)
                    for data in found.pieces:
                        self._throttle.take(len(data), self._stop)
                        if self._stop.is_set():
                            raise _Stopped
                        part.write(data, position)
                        digest.update(data)
                        position += len(data)
                        self._count(part, len(data), len(data))
                        patience.progressed()
            except Again as problem:
                self._trouble = problem.message
                patience.wait(problem, self._stop)
                if self._stop.is_set():
                    raise _Stopped from problem
            except (RangeRefused, FileChanged):
                # Parts of two versions may be mixed: the next run starts this file anew.
                part.forget()
                raise
        return digest.hexdigest()

    def _count(self, part: Part, done: int, fetched: int) -> None:
        with self._changed:
            self._done[id(part)] += done
            self.fetched_bytes += fetched
            self._trouble = None
