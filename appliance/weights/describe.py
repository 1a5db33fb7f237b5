"""A manifest of a plain folder, so that any web server or disk can be a mirror of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.weights.folder import FolderSource
from appliance.weights.manifest import CHUNK_BYTES, File, Manifest, Summary, chunk_span
from appliance.weights.source import Wanted


def describe(
    source: FolderSource,
    *,
    model: str,
    revision: str | None,
    licence: str | None,
    observe: Callable[[int, int], None],
) -> Manifest:
    """Every file read once and hashed; the headers must parse, as for a release."""
    # A shell has emptied the manifest that this one is to replace before this is run.
    offer = source.as_it_lies()
    summary = Summary.of(read_checkpoint(source.folder))
    done, files = 0, []
    for wanted in offer.files:
        files.append(_file(source, wanted))
        done += wanted.size_bytes
        observe(done, offer.size_bytes)
    return Manifest(
        model=model,
        revision=revision,
        licence=licence,
        source=None,
        files=tuple(files),
        checkpoint=summary,
    )


def _file(source: FolderSource, wanted: Wanted) -> File:
    whole, chunks = hashlib.sha256(), []
    for index in range(-(-wanted.size_bytes // CHUNK_BYTES)):
        start, stop = chunk_span(wanted.size_bytes, index)
        chunk = hashlib.sha256()
        with source.read(wanted, start, stop) as found:
            for piece in found.pieces:
                whole.update(piece)
                chunk.update(piece)
        chunks.append(chunk.hexdigest())
    return File(
        path=wanted.path,
        size_bytes=wanted.size_bytes,
        sha256=whole.hexdigest(),
        chunks=tuple(chunks),
    )
