"""Marks: what a blob looked like when its bytes were last proved, so that clean ones are skipped.

A mark is no proof: it says that the file has not been written since it was proved (size, inode,
mtime, ctime in nanoseconds). A disk that rots says nothing; `verify --full` reads every byte.
The second line of a mark's file is the sha256 of each chunk.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Annotated

from pydantic import Field, ValidationError

from appliance import durable
from appliance.weights.manifest import CHUNK_BYTES, Strict, chunk_count
from appliance.weights.names import SHA256
from appliance.weights.store import Store

READ_BYTES = 1 << 20


class Mark(Strict):
    size_bytes: int
    inode: int
    modified_ns: int
    changed_ns: int
    proved_at: Annotated[float, Field(description="seconds since 1970, by this machine's clock")]


def write_mark(store: Store, sha256: str, chunks: tuple[str, ...]) -> None:
    """Say that the blob, as it is now, was read and is right."""
    found = store.blob(sha256).lstat()
    mark = Mark(
        size_bytes=found.st_size,
        inode=found.st_ino,
        modified_ns=found.st_mtime_ns,
        changed_ns=found.st_ctime_ns,
        proved_at=time.time(),
    )
    text = f"{mark.model_dump_json()}\n{' '.join(chunks)}\n"
    # Not synced: what power loss leaves of a mark does not parse, and the blob is read again.
    durable.write_file(store.marks / sha256, text.encode(), synced=False)


def clean_mark(store: Store, sha256: str) -> Mark | None:
    """The mark, if the blob is a regular file that nobody has written to since."""
    try:
        found = os.lstat(store.blob(sha256))
        with (store.marks / sha256).open("rb") as stream:
            mark = Mark.model_validate_json(stream.readline())
    except (OSError, ValidationError):
        return None  # no mark, or half of one: then the blob counts as not proved
    same = (mark.size_bytes, mark.inode, mark.modified_ns, mark.changed_ns) == (
        found.st_size,
        found.st_ino,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )
    return mark if same else None


def known_chunks(store: Store, sha256: str) -> tuple[str, ...] | None:
    """The sha256 of each chunk of a blob with a clean mark; proved again if the mark has lost them.

    None where there is no such blob, or its bytes are wrong.
    """
    if not store.blob(sha256).is_file():
        return None
    for attempt in range(2):
        mark = clean_mark(store, sha256) if attempt == 0 else prove(store, sha256)
        if mark is None:
            continue
        lines = (store.marks / sha256).read_bytes().decode("ascii", "replace").split("\n")
        chunks = tuple(lines[1].split()) if len(lines) > 1 else ()
        whole = len(chunks) == chunk_count(mark.size_bytes)
        if whole and all(SHA256.fullmatch(chunk) for chunk in chunks):
            return chunks
    return None


def prove(store: Store, sha256: str) -> Mark | None:
    """Read a whole blob and mark it; None where its bytes are not what its name says."""
    whole, chunks = hashlib.sha256(), []
    with store.blob(sha256).open("rb", buffering=0) as stream:
        piece = hashlib.sha256()
        at = 0
        while data := stream.read(min(READ_BYTES, CHUNK_BYTES - at % CHUNK_BYTES)):
            whole.update(data)
            piece.update(data)
            at += len(data)
            if at % CHUNK_BYTES == 0:
                chunks.append(piece.hexdigest())
                piece = hashlib.sha256()
    if at % CHUNK_BYTES:
        chunks.append(piece.hexdigest())
    if whole.hexdigest() != sha256:
        drop_mark(store, sha256)
        return None
    write_mark(store, sha256, tuple(chunks))
    return clean_mark(store, sha256)


def drop_mark(store: Store, sha256: str) -> None:
    (store.marks / sha256).unlink(missing_ok=True)
