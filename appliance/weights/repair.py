"""Repair: fetch the chunks that are wrong, those alone, prove them in memory, write them in place.

A kill in between leaves the chunk as wrong as it was, and unmarked: verify finds it again.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from contextlib import closing

from appliance.errors import SourceError
from appliance.weights.fetch import Transfer
from appliance.weights.manifest import File, chunk_span
from appliance.weights.marks import drop_mark
from appliance.weights.pull import ask
from appliance.weights.source import Again, Source, Wanted
from appliance.weights.store import Store
from appliance.weights.verify import BadChunk


def repair(store: Store, source: Source, bad: Sequence[BadChunk], transfer: Transfer) -> int:
    """Write the right bytes over every bad chunk; gives the bytes fetched. Verify again after."""
    with store.pulling(f"repair from {source.name}"), closing(source):
        offered = {file.path: file for file in ask(source, transfer).files}
        fetched = 0
        for chunk in bad:
            wanted = offered.get(chunk.file.path)
            if wanted is None or wanted.size_bytes != chunk.file.size_bytes:
                raise SourceError(
                    f"{source.name} has no {chunk.file.path} of {chunk.file.size_bytes:,} bytes",
                    fix="repair from the source of this very release",
                )
            data = _fetch(source, wanted, chunk, transfer)
            fetched += len(data)
            _write(store, chunk.file, chunk.index, data)
    return fetched


def _fetch(source: Source, wanted: Wanted, chunk: BadChunk, transfer: Transfer) -> bytearray:
    start, stop = chunk_span(chunk.file.size_bytes, chunk.index)
    patience = transfer.patience
    data = bytearray()
    while len(data) < stop - start:
        try:
            with source.read(wanted, start + len(data), stop) as found:
                for piece in found.pieces:
                    data += piece
                    patience.progressed()
        except Again as problem:
            patience.wait(problem, threading.Event())
    digest = hashlib.sha256(data).hexdigest()
    if digest != chunk.file.chunks[chunk.index]:
        raise SourceError(
            f"{source.name} sends {chunk.file.path}, bytes {start:,} to {stop - 1:,}, with sha256 "
            f"{digest}, not {chunk.file.chunks[chunk.index]}",
            fix="repair from another source",
        )
    return data


def _write(store: Store, file: File, index: int, data: bytearray) -> None:
    blob = store.blob(file.sha256)
    drop_mark(store, file.sha256)
    mode = blob.stat().st_mode & 0o777
    blob.chmod(mode | 0o200)
    try:
        descriptor = os.open(blob, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.ftruncate(descriptor, file.size_bytes)
            start, view = chunk_span(file.size_bytes, index)[0], memoryview(data)
            while view:
                written = os.pwrite(descriptor, view, start)
                view, start = view[written:], start + written
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    finally:
        blob.chmod(0o444)
