"""Pull: from a source to a complete release. Kill it anywhere and run it again: it goes on."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from appliance.checkpoint.model import Checkpoint
from appliance.errors import WeightsError
from appliance.weights import guard
from appliance.weights.fetch import Fetch, Observe, Transfer
from appliance.weights.manifest import File, Manifest
from appliance.weights.marks import known_chunks
from appliance.weights.names import check_paths
from appliance.weights.part import Part, staging_key
from appliance.weights.preview import preview
from appliance.weights.release import commit_release
from appliance.weights.source import Again, Offer, Source, Wanted
from appliance.weights.store import Store

# Room besides the files, for journals, marks, manifests and whoever else writes: a tenth, but of a
# large model not more than a full disk's own trouble needs.
MARGIN_SHARE = 0.1
MAX_MARGIN_BYTES = 4 << 30
MIN_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Pulled:
    """`fetched_bytes` came over the wire; `reused_bytes` were in the store already."""

    release: str
    manifest: Manifest
    fetched_bytes: int
    reused_bytes: int
    seconds: float


def pull(
    store: Store,
    source: Source,
    transfer: Transfer,
    observe: Observe,
    look: Callable[[Checkpoint], None] = lambda checkpoint: None,
) -> Pulled:
    """The release that `source` offers, complete and proved in `store`; nothing is activated.

    `look` sees the checkpoint, from its headers alone, before the first byte of a shard is fetched;
    what it raises ends the pull.
    Raises SourceError where the source fails, WeightsError where the disk does, CheckpointError
    where the files are what was promised and yet no model.
    """
    started = time.monotonic()
    with store.pulling(f"pull of {source.name}"), closing(source):
        offer = ask(source, transfer)
        store.check_signature(offer.manifest, source.name)
        check_paths(file.path for file in offer.files)
        have = {file.path: found for file in offer.files if (found := _in_store(store, file))}
        missing = _distinct(file for file in offer.files if file.path not in have)
        check_room(store, missing)
        if missing:
            look(preview(store, source, offer, lambda: transfer.patience))
        parts = [Part(store, file) for file in missing]
        fetch = Fetch(source, parts, transfer)
        fetch.run(observe)
        made = _manifest(store, source, offer, have, parts)
        store.check_signature(made, source.name)  # what was signed is what came
        release = commit_release(store, made)
    return Pulled(
        release=release.release_id,
        manifest=release,
        fetched_bytes=fetch.fetched_bytes,
        reused_bytes=sum(file.size_bytes for file in have.values()),
        seconds=time.monotonic() - started,
    )


def ask(source: Source, transfer: Transfer) -> Offer:
    """What the source offers, asked again while it is busy."""
    patience = transfer.patience
    while True:
        try:
            return source.offer()
        except Again as problem:
            patience.wait(problem, threading.Event())


def check_room(store: Store, missing: Sequence[Wanted]) -> None:
    """Refuse before the first byte what could not end: space, file sizes, inodes."""
    needed = sum(file.size_bytes - _staged_bytes(store, file) for file in missing)
    margin = min(MAX_MARGIN_BYTES, int(needed * MARGIN_SHARE)) + MIN_MARGIN_BYTES
    free = guard.free_bytes(store.folder)
    if needed + margin > free:
        held = sum(found.st_blocks * 512 for _, found in store.blob_names())
        raise WeightsError(
            f"{needed:,} bytes are to come and {store.folder} has {free:,} free "
            f"({held:,} are in the store's blobs): {needed + margin - free:,} bytes short with "
            f"{margin:,} of margin",
            fix="`appliance weights gc` frees what is neither current nor previous; or --store DIR",
        )
    largest = max((file.size_bytes for file in missing), default=0)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and largest > limit:
        raise WeightsError(
            f"the largest file has {largest:,} bytes; this process may write files of {limit:,}",
            fix="ulimit -f unlimited",
        )


def _in_store(store: Store, wanted: Wanted) -> File | None:
    """The file, if its blob is in the store; a blob without a clean mark is read again."""
    chunks = known_chunks(store, wanted.sha256) if wanted.sha256 is not None else None
    if wanted.sha256 is None or chunks is None:
        return None
    return File(
        path=wanted.path,
        size_bytes=wanted.size_bytes,
        sha256=wanted.sha256,
        chunks=chunks,
    )


def _distinct(files: Iterable[Wanted]) -> list[Wanted]:
    """Files with the same bytes come once."""
    distinct: dict[str, Wanted] = {}
    for file in files:
        distinct.setdefault(staging_key(file), file)
    return list(distinct.values())


def _staged_bytes(store: Store, wanted: Wanted) -> int:
    """Bytes of a file that an earlier run has written already."""
    try:
        found = (store.staging / f"{staging_key(wanted)}.part").stat()
    except OSError:
        return 0
    return min(found.st_blocks * 512, wanted.size_bytes)


def _manifest(
    store: Store, source: Source, offer: Offer, have: dict[str, File], parts: Sequence[Part]
) -> Manifest:
    fetched = {staging_key(part.wanted): part.sha256 for part in parts}
    files = []
    for wanted in offer.files:
        file = have.get(wanted.path)
        if file is None:
            sha256 = fetched[staging_key(wanted)]
            chunks = known_chunks(store, sha256) if sha256 else None
            if sha256 is None or chunks is None:
                raise WeightsError(f"the blob of {wanted.path} changed while the release was made")
            file = File(
                path=wanted.path, size_bytes=wanted.size_bytes, sha256=sha256, chunks=chunks
            )
        files.append(file)
    return Manifest(
        model=offer.model,
        revision=offer.revision,
        licence=offer.licence,
        source=source.name,
        files=tuple(files),
        signature=None if offer.manifest is None else offer.manifest.signature,
    )
