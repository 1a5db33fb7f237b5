"""Marks: what a blob looked like when its bytes were last proved, so that clean ones are skipped.

A mark is no proof: it says that the file has not been written since it was proved (size, inode,
mtime, ctime in nanoseconds). A disk that rots says nothing; `verify --full` reads every byte.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Annotated

from pydantic import Field, ValidationError

from appliance.weights import durable
from appliance.weights.manifest import CHUNK_BYTES, Sha256, Strict, chunk_count
from appliance.weights.store import Store

READ_BYTES = 1 << 20


class Mark(Strict):
    size_bytes: int
    inode: int
    modified_ns: int
    changed_ns: int
    proved_at: Annotated[float, Field(description="seconds since 1970, by this machine's clock")]
    chunks: tuple[Sha256, ...]


def write_mark(store: Store, sha256: str, chunks: tuple[str, ...]) -> None:
    """Say that the blob, as it is now, was read and is right."""
    found = store.blob(sha256).lstat()
    mark = Mark(
        size_bytes=found.st_size,
        inode=found.st_ino,
        modified_ns=found.st_mtime_ns,
        changed_ns=found.st_ctime_ns,
        proved_at=time.time(),
        chunks=chunks,
    )
    # Not synced: what power loss leaves of a mark does not parse, and the blob is read again.
    durable.write_file(store.marks / sha256, mark.model_dump_json().encode(), synced=False)


def clean_mark(store: Store, sha256: str) -> Mark | None:
    """The mark, if the blob is a regular file that nobody has written to since."""
    try:
        found = os.lstat(store.blob(sha256))
        mark = Mark.model_validate_json((store.marks / sha256).read_bytes())
    except (OSError, ValidationError):
        return None  # no mark, or half of one: then the blob counts as not proved
    same = (mark.size_bytes, mark.inode, mark.modified_ns, mark.changed_ns) == (
        found.st_size,
        found.st_ino,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )
    return mark if same and len(mark.chunks) == chunk_count(found.st_size) else None


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
