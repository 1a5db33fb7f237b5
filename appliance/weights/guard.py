"""What a store's writes are guarded by: a lock that dies with its holder, and room on the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.errors import WeightsError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


@contextmanager
def locked(path: Path, what: str, *, patience_seconds: float = 0) -> Iterator[None]:
    """Hold the lock file `path`; it frees itself when the process dies, however it dies.

    Raises WeightsError, which names the holder, when the lock is not free in time.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + patience_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                    raise WeightsError(
                        f"the store is busy: {holder or 'another process holds ' + path.name}",
                        fix="wait until it is over, then run this again",
                    ) from None
                time.sleep(0.05)
        with contextlib.suppress(OSError):  # on a full disk the holder has no name, that is all
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{what}, process {os.getpid()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Nobody else of ours writes into `folder` meanwhile; no file is left behind for it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise WeightsError(
            f"another process writes into {folder}",
            fix="wait until it is over, then run this again",
        ) from error
    finally:
        os.close(descriptor)


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Turn the errors of a full, read-only or limited file system into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        where = error.filename or folder
        raise WeightsError(
            f"cannot write {where}: {error.strerror} ({free_text(folder)})", fix=_way_out(error)
        ) from error


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write on the file system of `folder`."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def free_text(folder: Path) -> str:
    try:
        return f"{free_bytes(folder):,} bytes free"
    except OSError:
        return "free space unknown"


def _way_out(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space (`appliance weights gc`), then run this again: it resumes"
    if error.errno == errno.EFBIG:
        return "use a file system, and a file size limit (ulimit -f), that hold the largest file"
    if error.errno == errno.EIO:
        return "look for disk errors in the kernel's log"
    return "make the store writable for this user, or choose another with --store"
