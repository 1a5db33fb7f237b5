"""Verify: every chunk against the manifest, offline, on all cores; repair fetches chunks alone.

By default only blobs that were written to since they were last proved are read; `full` reads all.
Progress is kept blob by blob as marks, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from appliance import durable
from appliance.checkpoint.exl3 import read_checkpoint
from appliance.errors import ApplianceError
from appliance.weights.manifest import File, Summary, chunk_span
from appliance.weights.marks import READ_BYTES, clean_mark, drop_mark, write_mark
from appliance.weights.pace import Throttle
from appliance.weights.release import check_release
from appliance.weights.store import Store

RESUME_SECONDS = 7 * 86400.0  # what was proved longer ago is no part of this run
ObserveBytes = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class BadChunk:
    """Bytes start..stop-1 of a file are not what the manifest says."""

    release: str
    file: File
    index: int

    @property
    def text(self) -> str:
        start, stop = chunk_span(self.file.size_bytes, self.index)
        return f"{self.file.path}: bytes {start:,} to {stop - 1:,} are wrong"


@dataclass
class Verdict:
    """`read_bytes` were read now, `skipped_bytes` had a clean mark; `problems` are sentences."""

    read_bytes: int = 0
    skipped_bytes: int = 0
    bad: list[BadChunk] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    marks_saved: bool = True

    @property
    def is_right(self) -> bool:
        return not self.bad and not self.problems


@dataclass(frozen=True, slots=True)
class Reading:
    """How to verify: all bytes or only dirty blobs, threads (default: one a core), bytes a second.

    `leave_cache` drops from the page cache what was read, for a scrub beside a serving engine.
    """

    full: bool = False
    threads: int | None = None
    bytes_per_second: int | None = None
    leave_cache: bool = False


def verify(
    store: Store, releases: Sequence[str], reading: Reading, observe: ObserveBytes
) -> Verdict:
    """What is wrong with these releases. Raises only where the store itself cannot be read."""
    verdict = Verdict()
    since = _full_since(store) if reading.full else None
    files: dict[str, tuple[str, File]] = {}
    for release in releases:
        problems = check_release(store, release)
        verdict.problems += [f"{release}: {text}" for text in problems]
        for file in store.manifest(release).files:
            if store.blob(file.sha256).is_file():
                files.setdefault(file.sha256, (release, file))
    dirty = []
    for sha256, (release, file) in files.items():
        mark = clean_mark(store, sha256)
        proved = mark is not None and (since is None or mark.proved_at >= since)
        if proved:
            verdict.skipped_bytes += file.size_bytes
        else:
            dirty.append((release, file))
    _Reader(store, dirty, reading, verdict).run(observe)
    for release in releases:
        if verdict.is_right:
            verdict.problems += _headers_agree(store, release)
    if since is not None and verdict.is_right:
        with contextlib.suppress(OSError):
            (store.marks / "full-since").unlink(missing_ok=True)
    return verdict


class _Reader:
    """Chunks from one queue to threads, in order, so that files are done one after another."""

    def __init__(
        self, store: Store, files: list[tuple[str, File]], reading: Reading, verdict: Verdict
    ) -> None:
        self._store, self._reading, self._verdict = store, reading, verdict
        self._total = sum(file.size_bytes for _, file in files)
        self._jobs: queue.SimpleQueue[tuple[str, File, int]] = queue.SimpleQueue()
        self._left = {file.sha256: len(file.chunks) for _, file in files}
        self._wrong: set[str] = set()
        for release, file in files:
            for index in range(len(file.chunks)):
                self._jobs.put((release, file, index))
            if file.size_bytes != store.blob(file.sha256).lstat().st_size:
                verdict.problems.append(f"{file.path} has not the {file.size_bytes:,} bytes it had")
                self._wrong.add(file.sha256)
            if not file.chunks and file.sha256 not in self._wrong:
                self._mark(file)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._throttle = Throttle(reading.bytes_per_second)
        self._problem: BaseException | None = None

    def run(self, observe: ObserveBytes) -> None:
        count = self._reading.threads or os.cpu_count() or 1
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
                    observe(self._verdict.read_bytes, self._total)
        finally:
            self._stop.set()
        if self._problem is not None:
            raise self._problem

    def _work(self) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        try:
            while not self._stop.is_set():
                try:
                    release, file, index = self._jobs.get_nowait()
                except queue.Empty:
                    return
                self._check(release, file, index, buffer)
        except BaseException as problem:  # noqa: BLE001  handed to the caller of run
            self._problem = problem
            self._stop.set()

    def _check(self, release: str, file: File, index: int, buffer: memoryview) -> None:
        start, stop = chunk_span(file.size_bytes, index)
        digest = self._digest(file, start, stop, buffer)
        if self._stop.is_set():
            return
        with self._lock:
            self._verdict.read_bytes += stop - start
            self._left[file.sha256] -= 1
            if digest != file.chunks[index]:
                self._verdict.bad.append(BadChunk(release, file, index))
                self._wrong.add(file.sha256)
                drop = True
            else:
                drop = False
            finished = not self._left[file.sha256] and file.sha256 not in self._wrong
        if drop:
            self._save(lambda: drop_mark(self._store, file.sha256))
        if finished:
            self._mark(file)

    def _digest(self, file: File, start: int, stop: int, buffer: memoryview) -> str:
        digest = hashlib.sha256()
        descriptor = os.open(self._store.blob(file.sha256), os.O_RDONLY)
        try:
            at = start
            while at < stop and not self._stop.is_set():
                self._throttle.take(min(READ_BYTES, stop - at), self._stop)
                got = os.preadv(descriptor, [buffer[: stop - at]], at)
                if not got:
                    break
                digest.update(buffer[:got])
                at += got
            if self._reading.leave_cache:
                os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            # A sector that cannot be read is a chunk that is wrong; repair writes it anew.
            return f"unreadable: {error.strerror}"
        finally:
            os.close(descriptor)
        return digest.hexdigest()

    def _mark(self, file: File) -> None:
        self._save(lambda: write_mark(self._store, file.sha256, file.chunks))

    def _save(self, change: Callable[[], None]) -> None:
        """A store that cannot be written is verified all the same; only the marks are not kept."""
        try:
            change()
        except OSError:
            self._verdict.marks_saved = False


def _full_since(store: Store) -> float:
    """When the full run began that this one belongs to: an interrupted one goes on."""
    path = store.marks / "full-since"
    now = time.time()
    with contextlib.suppress(OSError, ValueError):
        since = float(path.read_text())
        if now - RESUME_SECONDS < since <= now:
            return since
    with contextlib.suppress(OSError):  # a read-only store is read in one go
        durable.write_file(path, f"{now!r}\n".encode())
    return now


def _headers_agree(store: Store, release: str) -> list[str]:
    """The headers parse, and say what they said when the release was made."""
    expected = store.manifest(release).checkpoint
    try:
        found = Summary.of(read_checkpoint(store.release_folder(release)))
    except ApplianceError as error:
        return [f"{release}: {error.message}"]
    if expected is not None and found != expected:
        return [f"{release}: the headers say other than the manifest: {found} and {expected}"]
    return []
