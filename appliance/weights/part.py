"""One file on its way into the store: bytes by chunk in any order, hashed in order behind them."""

from __future__ import annotations

import hashlib
import os
import threading

from appliance import durable
from appliance.errors import SourceError
from appliance.weights.journal import Journal
from appliance.weights.manifest import CHUNK_BYTES, chunk_count, chunk_span
from appliance.weights.marks import write_mark
from appliance.weights.source import FileChanged, Wanted
from appliance.weights.store import Store

READ_BYTES = 1 << 20
_ZEROS = bytes(READ_BYTES)


class Part:
    """staging/<key>.part and its journal. Threads may write different chunks at once."""

    def __init__(self, store: Store, wanted: Wanted) -> None:
        self.store = store
        self.wanted = wanted
        self.sha256: str | None = None  # once finished
        self.restarts = 0
        self._lock = threading.Lock()
        self._hashing = threading.Lock()
        key = staging_key(wanted)
        self.path = store.staging / f"{key}.part"
        fresh = not self.path.exists()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._descriptor, wanted.size_bytes)  # a file too large is known at once
        self._journal_path = store.staging / f"{key}.journal"
        if fresh:
            self._journal_path.unlink(missing_ok=True)
        self._journal = Journal(self._journal_path, key, wanted.size_bytes)
        if wanted.chunks is not None:
            # Journalled from a source that could not be held to account chunk by chunk.
            wrong = {i for i, sha in self._chunks.items() if sha != wanted.chunks[i]}
            if wrong:
                self._journal.forget(wrong)
        self._start_hash()

    @property
    def chunk_count(self) -> int:
        return chunk_count(self.wanted.size_bytes)

    @property
    def missing(self) -> list[int]:
        return [i for i in range(self.chunk_count) if i not in self._journal.chunks]

    @property
    def done_bytes(self) -> int:
        with self._lock:
            return sum(
                stop - start
                for start, stop in (chunk_span(self.wanted.size_bytes, i) for i in self._chunks)
            )

    @property
    def _chunks(self) -> dict[int, str]:
        return self._journal.chunks

    def check_tag(self, tag: str | None) -> None:
        """Every byte of one file must come from one version of it. Raises FileChanged."""
        if tag is None:
            return
        with self._lock:
            if self._journal.tag is None:
                self._journal.set_tag(tag)
            elif self._journal.tag != ascii(tag):
                before = self._journal.tag
                raise FileChanged(
                    f"{self.wanted.path} changed at its source while it was fetched: it was "
                    f"{before}, now {tag!a}",
                    fix="run this again: this file starts anew",
                )

    def write(self, data: bytes, at: int) -> None:
        if data == _ZEROS[: len(data)] and self._is_hole(at, at + len(data)):
            return  # sparse stays sparse
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, at)
            view, at = view[written:], at + written

    def add(self, index: int, sha256: str) -> bool:
        """The chunk is written. True for the one call that completes the file."""
        with self._lock:
            self._journal.add(index, sha256)
            return len(self._chunks) == self.chunk_count

    def follow(self, *, to_the_end: bool = False) -> None:
        """Hash what is there without a gap, while it is still in memory."""
        if not self._hashing.acquire(blocking=to_the_end):
            return
        try:
            while self._hashed < self.wanted.size_bytes:
                with self._lock:
                    if self._hashed // CHUNK_BYTES not in self._chunks:
                        return
                self._hash_to(chunk_span(self.wanted.size_bytes, self._hashed // CHUNK_BYTES)[1])
        finally:
            self._hashing.release()

    def finish(self) -> bool:
        """Prove the whole file and give it its name in the store.

        False where some bytes are wrong: then what must come again is missing once more.
        """
        self.follow(to_the_end=True)
        digest = self._digest.hexdigest()
        expected = self.wanted.sha256
        right = expected in (None, digest)
        if right and self._git is not None:
            right = self._git.hexdigest() == self.wanted.git_oid
        if not right:
            self._mistrust(digest)
            return False
        os.fchmod(self._descriptor, 0o444)
        os.fsync(self._descriptor)
        self._commit(digest)
        return True

    def restart(self, why: str) -> None:
        """All of the file must come again, once; raises SourceError with `why` the second time."""
        self.restarts += 1
        self._journal.restart()
        self._start_hash()
        if self.restarts > 1:
            raise SourceError(why, fix="the source is damaged or lies: use another one")

    def forget(self) -> None:
        """The next run starts this file anew."""
        self._journal.restart()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _commit(self, sha256: str) -> None:
        chunks = tuple(self._chunks[i] for i in range(self.chunk_count))
        blob = self.store.blob(sha256)
        durable.make_folder(blob.parent)
        self.path.replace(blob)
        durable.sync_folder(blob.parent)
        durable.sync_folder(self.path.parent)
        write_mark(self.store, sha256, chunks)
        self._journal_path.unlink(missing_ok=True)
        self.sha256 = sha256
        self.close()

    def _mistrust(self, digest: str) -> None:
        """Which chunks are not what came? Else the source itself sent the wrong bytes."""
        bad = {i for i, sha in self._chunks.items() if self._chunk_digest(i) != sha}
        if bad:  # the disk lost them, as power loss does
            self._journal.forget(bad)
            self._start_hash()
            return
        proof = self.wanted.sha256 or f"git id {self.wanted.git_oid}"
        self.restart(
            f"{self.wanted.path}: the source sent {self.wanted.size_bytes:,} bytes with sha256 "
            f"{digest}, twice not what it promised ({proof})"
        )

    def _chunk_digest(self, index: int) -> str:
        digest = hashlib.sha256()
        start, stop = chunk_span(self.wanted.size_bytes, index)
        while start < stop:
            data = os.pread(self._descriptor, min(READ_BYTES, stop - start), start)
            if not data:
                break
            digest.update(data)
            start += len(data)
        return digest.hexdigest()

    def _start_hash(self) -> None:
        self._hashed = 0
        self._digest = hashlib.sha256()
        self._git = None
        if self.wanted.git_oid is not None:
            # git's id of a file; sha1 is all the hub gives for small ones.
            self._git = hashlib.sha1(usedforsecurity=False)
            self._git.update(f"blob {self.wanted.size_bytes}\0".encode())

    def _hash_to(self, stop: int) -> None:
        while self._hashed < stop:
            data = os.pread(self._descriptor, min(READ_BYTES, stop - self._hashed), self._hashed)
            if not data:
                raise OSError(f"{self.path} became shorter while it was written")
            self._digest.update(data)
            if self._git is not None:
                self._git.update(data)
            self._hashed += len(data)

    def _is_hole(self, start: int, stop: int) -> bool:
        try:
            return os.lseek(self._descriptor, start, os.SEEK_DATA) >= stop
        except OSError:  # ENXIO: no data from here to the end
            return True


def staging_key(wanted: Wanted) -> str:
    """Where a file waits: by its hash where it is known, so that any source can complete it."""
    if wanted.sha256 is not None:
        return wanted.sha256
    name = wanted.git_oid or hashlib.sha256(f"{wanted.path}\0{wanted.version}".encode()).hexdigest()
    return f"unproved-{name}-{wanted.size_bytes}"
