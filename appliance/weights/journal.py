"""The journal of one file on its way: which chunks are there, and what their bytes hash to.

Lines of text, appended in one write each: a line that a kill cut short counts as not written. Not
synced chunk by chunk: after power loss the disk may hold less than the journal says, and the hash
over the whole file, made anyway before the file gets its name, finds it; the journal then says
which chunks.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from appliance import durable
from appliance.weights.manifest import chunk_count

_CHUNK = re.compile(r"chunk (\d+) ([0-9a-f]{64})")


class Journal:
    """`chunks` maps index to sha256; `tag` is ascii() of the source's ETag, None until known."""

    def __init__(self, path: Path, key: str, size_bytes: int) -> None:
        self._path = path
        self._count = chunk_count(size_bytes)
        self._first = f"file {key} {size_bytes}"
        self.chunks: dict[int, str] = {}
        self.tag: str | None = None
        lines = self._read()
        if lines and lines[0] == self._first:
            for line in lines[1:]:
                self._take(line)
        # Written anew: what a kill left behind the last good line is gone before more is added.
        self._rewrite()

    def add(self, index: int, sha256: str) -> None:
        self.chunks[index] = sha256
        self._append(f"chunk {index} {sha256}")

    def set_tag(self, tag: str) -> None:
        self.tag = ascii(tag)
        self._append(f"tag {self.tag}")

    def forget(self, indexes: set[int]) -> None:
        """These chunks are not there after all."""
        self.chunks = {i: sha for i, sha in self.chunks.items() if i not in indexes}
        self._rewrite()

    def restart(self) -> None:
        self.tag = None
        self.forget(set(self.chunks))

    def _read(self) -> list[str]:
        try:
            text = self._path.read_bytes().decode("ascii", "replace")
        except FileNotFoundError:
            return []
        return text.split("\n")[:-1]  # what has no newline was cut short

    def _take(self, line: str) -> None:
        found = _CHUNK.fullmatch(line)
        if found and int(found[1]) < self._count:
            self.chunks[int(found[1])] = found[2]
        elif line.startswith("tag "):
            self.tag = line.removeprefix("tag ")

    def _rewrite(self) -> None:
        lines = [self._first]
        if self.tag is not None:
            lines.append(f"tag {self.tag}")
        lines += [f"chunk {index} {sha}" for index, sha in sorted(self.chunks.items())]
        durable.write_file(
            self._path, "".join(f"{line}\n" for line in lines).encode(), synced=False
        )

    def _append(self, line: str) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)
