"""Experts where `weights repack` put them: blocks of a file, mapped read-only and read in place.

Nothing is copied, so nothing is held twice: the page cache is the host arena, and an engine that
starts again finds it there. Only the blocks asked for are mapped; between them lies nothing, so an
address that is no block's faults. No torch here.

Pages of a file have no huge pages, and lie on the node that read them first: they are read by
threads bound to the node, once more if they were there from before on another.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import queue
import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from appliance.engine.hostmem import (
    MPOL_BIND,
    HostMemoryError,
    Node,
    PageKind,
    libc,
    near_cpus,
    node_mask,
    view_of,
)
from appliance.engine.pinning import chunks
from appliance.engine.resident import pages_by_node

# A reader stays with one stretch: readahead follows a descriptor that goes straight on. Measured,
# cold: 2.2 GiB/s so, 0.9 where readers take turns at 4 MiB (docs/measurements).
STRETCH_BYTES, READ_BYTES = 64 << 20, 1 << 20
MOST_READERS = 16
_PROT_NONE, _PROT_READ = 0x0, 0x1
_MAP_SHARED_FIXED = 0x01 | 0x10
_MAP_RESERVED = 0x02 | 0x20 | 0x4000  # private, anonymous, no swap set aside
_MADV_POPULATE_READ = 22
_SYS_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}


def runs(blocks: Iterable[tuple[int, int]]) -> list[range]:
    """(offset, bytes) of blocks -> ranges of the file, neighbours joined, ascending."""
    out: list[range] = []
    for start, size in sorted(blocks):
        if out and out[-1].stop == start:
            out[-1] = range(out[-1].start, start + size)
        else:
            out.append(range(start, start + size))
    return out


def chunks_of(run: range, starts: Sequence[int]) -> list[range]:
    """One run cut for registration, between blocks (pinning.chunks)."""
    first, last = bisect_left(starts, run.start), bisect_left(starts, run.stop)
    inside = [start - run.start for start in starts[first:last]]
    return [range(run.start + c.start, run.start + c.stop) for c in chunks(inside, len(run))]


class FileMapping:
    """`pieces` of a file at `address` + their offsets, resident when it returns, read-only.

    Pieces begin and end at whole pages, ascending. Raises HostMemoryError where the file cannot be
    read, or the kernel does not let threads be bound to `node`.
    """

    page_kind: PageKind = "file"

    def __init__(self, path: Path, pieces: Sequence[range], node: Node | None = None) -> None:
        self.path, self.pieces, self.node = path, list(pieces), node
        if any(edge % mmap.PAGESIZE for p in pieces for edge in (p.start, p.stop)):
            raise HostMemoryError(f"{path}: a piece does not begin or end with a page")
        if any(a.stop > b.start for a, b in pairwise(pieces)):
            raise HostMemoryError(f"{path}: pieces overlap")
        self.size_bytes = self.mapped_bytes = pieces[-1].stop if pieces else 0
        self._base: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise HostMemoryError(f"cannot read {path}: {error.strerror}") from error
        try:
            self.address = self._reserve()
            self._map()
            self._read()
            if node is not None and self._nodes() - {node.index}:
                # Somebody read it before, on another node: let the cache go, and read it here.
                self._reserve(self.address)
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                self._map()
                self._read()
        except BaseException:
            self.close()
            raise

    def contains(self, address: int, size_bytes: int) -> bool:
        start, stop = address - self.address, address - self.address + size_bytes
        return any(p.start <= start and stop <= p.stop for p in self.pieces)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes of the file; to write them, or to read between the pieces, is SIGSEGV."""
        return view_of(self.address, self.size_bytes, offset, size_bytes)

    def close(self) -> None:
        if self._base is not None:
            libc.munmap(self._base, self.size_bytes)
            self._base = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _nodes(self) -> set[int]:
        return set(pages_by_node(self.address, self.size_bytes))

    def _reserve(self, at: int | None = None) -> int:
        """Addresses for all of the file, with nothing behind them."""
        fixed = 0 if at is None else 0x10
        base = libc.mmap(at, self.size_bytes, _PROT_NONE, _MAP_RESERVED | fixed, -1, 0)
        if base in (None, ctypes.c_void_p(-1).value):
            raise self._refused(f"reserve {self.size_bytes:,} bytes of addresses")
        self._base = base
        return int(base)

    def _map(self) -> None:
        for p in self.pieces:
            at = self.address + p.start
            found = libc.mmap(at, len(p), _PROT_READ, _MAP_SHARED_FIXED, self._descriptor, p.start)
            if found != at:
                raise self._refused(f"map {len(p):,} bytes at {p.start:,}")

    def _read(self) -> None:
        """Every piece into the page cache, in order, and into this process's tables."""
        jobs: queue.SimpleQueue[range] = queue.SimpleQueue()
        for p in self.pieces:
            for start in range(p.start, p.stop, STRETCH_BYTES):
                jobs.put(range(start, min(start + STRETCH_BYTES, p.stop)))
        problems: list[HostMemoryError] = []
        count = min(MOST_READERS, 2 * near_cpus(self.node))
        workers = [threading.Thread(target=self._work, args=(jobs, problems)) for _ in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if problems:
            raise problems[0]

    def _work(self, jobs: queue.SimpleQueue[range], problems: list[HostMemoryError]) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            if self.node is not None:
                _read_onto(self.node)
            while not problems:
                try:
                    job = jobs.get_nowait()
                except queue.Empty:
                    return
                self._read_piece(descriptor, job, buffer)
        except HostMemoryError as problem:
            problems.append(problem)
        finally:
            os.close(descriptor)

    def _read_piece(self, descriptor: int, piece: range, buffer: memoryview) -> None:
        # read(2) first: its readahead is larger than that of a fault.
        at = piece.start
        while at < piece.stop:
            try:
                got = os.preadv(descriptor, [buffer[: piece.stop - at]], at)
            except OSError as error:
                raise HostMemoryError(
                    f"cannot read {self.path} at byte {at:,}: {error.strerror}. Try: look for disk "
                    "errors in the kernel's log, then appliance weights repack"
                ) from error
            if not got:
                raise HostMemoryError(
                    f"{self.path} ends at byte {at:,}, before {piece.stop:,}. Try: appliance "
                    "weights repack again"
                )
            at += got
        start = self.address + piece.start
        while libc.madvise(start, len(piece), _MADV_POPULATE_READ) != 0:
            number = ctypes.get_errno()
            if number == errno.EINVAL:  # before Linux 5.14: touch every page
                bytes(self.view(piece.start, len(piece))[:: mmap.PAGESIZE])
            elif number not in (errno.EINTR, errno.EAGAIN):
                raise self._refused(f"map the pages of bytes {piece.start:,} to {piece.stop:,}")
            else:
                continue
            return

    def _refused(self, what: str) -> HostMemoryError:
        number = ctypes.get_errno()
        why = os.strerror(number)
        return HostMemoryError(f"the kernel refused to {what} of {self.path}: {why}")


def _read_onto(node: Node) -> None:
    """What this thread reads from now on goes to the node's memory, and it runs near it."""
    allowed = node.cpus & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)
    number = _SYS_SET_MEMPOLICY.get(platform.machine())
    mask, bits = node_mask(node.index)
    if number is None or libc.syscall(ctypes.c_long(number), MPOL_BIND, mask, bits) != 0:
        reason = "no known call" if number is None else os.strerror(ctypes.get_errno())
        raise HostMemoryError(
            f"the kernel refused to read onto NUMA node {node.index}: {reason}. Try: give the "
            "container the capability SYS_NICE"
        )
