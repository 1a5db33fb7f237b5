"""The headers before the bytes: what a model is, and whether its files agree, for a few megabytes.

Shards are looked at by their first bytes, written into sparse files of their full size; the reader
of checkpoints then sees a folder like any other. An index that forgets a shard, a Git LFS pointer
or an architecture that nobody can serve is known before 309 GiB were fetched.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.checkpoint.safetensors import MAX_HEADER_BYTES
from appliance.errors import CheckpointError
from appliance.weights.pace import Patience
from appliance.weights.source import Again, Offer, Source, Wanted
from appliance.weights.store import Store

SHARD = ".safetensors"
FIRST_BYTES = 512 << 10  # most headers are shorter: one request a shard
WHOLE_BYTES = 64 << 20  # config.json and the index; a larger JSON file is none of these
LOOKERS = 8


def preview(
    store: Store, source: Source, offer: Offer, patience: Callable[[], Patience]
) -> Checkpoint:
    """The checkpoint on offer, from headers alone. Its `path` is gone when this returns.

    Raises CheckpointError for what would load wrong, SourceError where the source fails.
    """
    for left in store.staging.glob("look-*"):  # by a run that was killed
        shutil.rmtree(left)
    wanted = [
        file
        for file in offer.files
        if "/" not in file.path and (file.path.endswith(SHARD) or _is_small_json(file))
    ]
    with tempfile.TemporaryDirectory(prefix="look-", dir=store.staging) as name:
        folder = Path(name)

        def look(file: Wanted) -> None:
            blob = store.blob(file.sha256) if file.sha256 is not None else None
            if blob is not None and blob.is_file():
                (folder / file.path).symlink_to(blob)
            else:
                _write(source, file, folder / file.path, patience())

        with ThreadPoolExecutor(LOOKERS) as pool:
            for _ in pool.map(look, wanted):
                pass
        try:
            return read_checkpoint(folder)
        except CheckpointError as error:
            told = error.message.replace(f"{folder}/", "").replace(str(folder), source.name)
            raise type(error)(f"{told} (at {source.name})", fix=error.fix) from error


def _is_small_json(file: Wanted) -> bool:
    return file.path.endswith(".json") and file.size_bytes <= WHOLE_BYTES


def _write(source: Source, file: Wanted, path: Path, patience: Patience) -> None:
    size = file.size_bytes
    if not file.path.endswith(SHARD):
        path.write_bytes(_bytes(source, file, size, patience))
        return
    start = _bytes(source, file, min(size, FIRST_BYTES), patience)
    header = 8 + int.from_bytes(start[:8], "little")
    if len(start) < header <= min(size, 8 + MAX_HEADER_BYTES):
        start = _bytes(source, file, header, patience)
    with path.open("wb") as stream:
        stream.write(start)
        stream.truncate(size)


def _bytes(source: Source, file: Wanted, count: int, patience: Patience) -> bytes:
    """The first `count` bytes of a file; a whole file is held against its hash."""
    if count == 0:
        return b""
    while True:
        try:
            with source.read(file, 0, count) as found:
                data = b"".join(found.pieces)
            if count < file.size_bytes or _is_right(file, data):
                return data
            raise Again(f"{source.name} sent {file.path} with other bytes than it promised")
        except Again as problem:
            patience.wait(problem, threading.Event())


def _is_right(file: Wanted, data: bytes) -> bool:
    if file.sha256 is not None:
        return hashlib.sha256(data).hexdigest() == file.sha256
    if file.git_oid is not None:
        header = f"blob {len(data)}\0".encode()
        return hashlib.sha1(header + data, usedforsecurity=False).hexdigest() == file.git_oid
    return True
