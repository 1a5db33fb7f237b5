"""Shards that have been read give the page cache back, two files behind the reader.

While experts are pinned, the host holds them and, in the page cache, the shards they came from: a
machine that is sized for the one wedges on the sum. Two files behind, because ranks read the same
files and not at the same speed. No torch here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

KEPT = 2


class Behind:
    """`files`: tensor name -> its shard. A tensor that is none of theirs is ignored."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._read: list[Path] = []  # in the order they were begun

    def reached(self, tensor: str) -> None:
        """The loader has come to this tensor: shards two files back are done with."""
        file = self._files.get(tensor)
        if file is None or file in self._read[-KEPT:]:
            return
        self._read.append(file)
        for done in self._read[:-KEPT]:
            let_go(done)
        del self._read[:-KEPT]

    def finished(self) -> None:
        """All is read."""
        for file in self._read:
            let_go(file)
        self._read.clear()


def let_go(file: Path) -> None:
    """Drop a file's clean pages from the page cache, but those that somebody has mapped."""
    with contextlib.suppress(OSError):  # memory is saved or it is not: loading goes on
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
