"""How fast the model disk is read in sequence, past the page cache."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

BLOCK_BYTES = 16 << 20
MOST_BYTES = 4 << 30
SECONDS = 5.0
SMALLEST_BYTES = 64 << 20


def largest_file(folder: Path) -> Path | None:
    """The file to read: the largest of a checkpoint's folder, links followed."""
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return max(files, key=lambda path: path.stat().st_size, default=None)


def read_rate(path: Path, seconds: float = SECONDS) -> float:
    """Bytes per second of an O_DIRECT read of up to 4 GiB or `seconds`.

    Raises OSError where the file system refuses O_DIRECT, and ValueError where the file is too
    small to tell (64 MiB).
    """
    size = path.stat().st_size
    if size < SMALLEST_BYTES:
        raise ValueError(f"{path.name} has {size:,} B: too small to measure a disk with")
    buffer = mmap.mmap(-1, BLOCK_BYTES)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        read, start = 0, time.perf_counter()
        while read < MOST_BYTES and time.perf_counter() - start < seconds:
            got = os.preadv(file, [buffer], read)
            if got < BLOCK_BYTES:
                break
            read += got
        spent = time.perf_counter() - start
    finally:
        os.close(file)
        buffer.close()
    return read / spent
