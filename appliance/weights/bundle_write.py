"""Write a bundle: one tar stream, laid out before the first byte, cut into parts of equal size.

A part has its name only when it is complete, so a run after a kill goes on with the next part.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance import durable
from appliance.errors import SourceError, UsageError, WeightsError
from appliance.weights import guard
from appliance.weights.bundle import EXTRAS, INDEX, WEIGHTS, Bundle, Extra
from appliance.weights.collect import Beside
from appliance.weights.manifest import Manifest
from appliance.weights.names import MANIFEST
from appliance.weights.store import Store

READ_BYTES = 1 << 20
MIN_PART_BYTES = 1 << 20
SUMS = "SHA256SUMS"


@dataclass(frozen=True, slots=True)
class _Piece:
    """So many bytes of the stream: given, or from a file."""

    size_bytes: int
    data: bytes | None = None
    path: Path | None = None


def create_bundle(
    store: Store,
    release: str,
    folder: Path,
    *,
    beside: Beside,
    part_bytes: int,
    observe: Callable[[int, int], None],
) -> Bundle:
    """A bundle of `release` in `folder`, with what is `beside` the weights.

    `part_bytes` is the size of every part but the last; 4 GiB - 1 is the most FAT32 takes.
    """
    if part_bytes < MIN_PART_BYTES:
        raise UsageError(f"parts of {part_bytes:,} bytes; at least {MIN_PART_BYTES:,} are needed")
    bundle, pieces = _lay_out(store, store.manifest(release), beside, part_bytes)
    with guard.storing(folder):
        durable.make_folder(folder)
    with guard.alone_in(folder), guard.storing(folder):
        index = (bundle.model_dump_json(indent=1) + "\n").encode()
        _check_folder(folder, index)
        _check_room(folder, bundle)
        durable.write_file(folder / INDEX, index)
        sums = {INDEX: hashlib.sha256(index).hexdigest()}
        sums |= _write_parts(folder, bundle, pieces, observe)
        lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sums.items())
        durable.write_file(folder / SUMS, lines.encode())
    return bundle


def _extra(name: str, file: Path) -> Extra:
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        size = file.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    return Extra(path=name, size_bytes=size, sha256=digest)


def _lay_out(
    store: Store, manifest: Manifest, beside: Beside, part_bytes: int
) -> tuple[Bundle, list[_Piece]]:
    extras = [_extra(name, file) for name, file in beside.files.items()]
    members = [
        (f"{WEIGHTS}/{file.path}", file.size_bytes, store.blob(file.sha256))
        for file in manifest.files
    ]
    members += [
        (f"{EXTRAS}/{extra.path}", extra.size_bytes, beside.files[extra.path]) for extra in extras
    ]
    pieces, offsets, at = [], {}, 0

    def put(piece: _Piece) -> None:
        nonlocal at
        pieces.append(piece)
        at += piece.size_bytes

    text = manifest.to_json()
    for name, size, path in [(f"{WEIGHTS}/{MANIFEST}", len(text), None), *members]:
        header = _tar_header(name, size)
        put(_Piece(len(header), data=header))
        offsets[name] = at
        put(_Piece(size, path=path, data=text if path is None else None))
        put(_Piece(-size % tarfile.BLOCKSIZE, data=bytes(-size % tarfile.BLOCKSIZE)))
    put(_Piece(2 * tarfile.BLOCKSIZE, data=bytes(2 * tarfile.BLOCKSIZE)))
    del offsets[f"{WEIGHTS}/{MANIFEST}"]
    bundle = Bundle(
        manifest=manifest,
        images=beside.images,
        chart=beside.chart,
        extras=tuple(extras),
        part_bytes=part_bytes,
        stream_bytes=at,
        offsets=offsets,
    )
    return bundle, pieces


def _tar_header(name: str, size_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size_bytes, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def _check_folder(folder: Path, index: bytes) -> None:
    """The folder is empty, or holds an earlier run of this very bundle."""
    there = folder / INDEX
    if there.exists() and there.read_bytes() != index:
        raise WeightsError(f"{folder} holds another bundle", fix="choose an empty folder")
    if not there.exists() and any(folder.glob("part-*.tar")):
        raise WeightsError(
            f"{folder} holds parts of an unknown bundle", fix="choose another folder"
        )


def _check_room(folder: Path, bundle: Bundle) -> None:
    there = sum((folder / name).stat().st_size for name in bundle.parts if (folder / name).exists())
    free = guard.free_bytes(folder)
    needed = bundle.stream_bytes - there
    if needed > free:
        raise WeightsError(
            f"the bundle needs {needed:,} more bytes, {folder} has {free:,} free",
            fix="choose a larger disk; the parts may be spread over several media afterwards",
        )


def _write_parts(
    folder: Path, bundle: Bundle, pieces: list[_Piece], observe: Callable[[int, int], None]
) -> dict[str, str]:
    sums, done = {}, 0
    for index, name in enumerate(bundle.parts):
        path, size = folder / name, bundle.part_size(index)
        digest = hashlib.sha256()
        if path.exists() and path.stat().st_size == size:
            with path.open("rb") as stream:  # complete, from an earlier run
                digest = hashlib.file_digest(stream, "sha256")
        else:
            with durable.writing(path, alone=True) as out:
                start = index * bundle.part_bytes
                for data in _stream(pieces, start, start + size):
                    out.write(data)
                    digest.update(data)
                    observe(done + out.tell(), bundle.stream_bytes)
        done += size
        observe(done, bundle.stream_bytes)
        sums[name] = digest.hexdigest()
    return sums


def _stream(pieces: list[_Piece], start: int, stop: int) -> Iterator[bytes]:
    """Bytes start..stop-1 of the stream."""
    at = 0
    for piece in pieces:
        first, last = max(start, at), min(stop, at + piece.size_bytes)
        if first < last:
            if piece.data is not None:
                yield piece.data[first - at : last - at]
            elif piece.path is not None:
                yield from _file(piece.path, first - at, last - at)
        at += piece.size_bytes


def _file(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        stream.seek(start)
        while start < stop:
            data = stream.read(min(READ_BYTES, stop - start))
            if not data:
                raise SourceError(f"{path} became shorter while it was bundled")
            start += len(data)
            yield data
