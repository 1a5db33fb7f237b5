"""Air gap: all that a closed network needs, in parts that fit a medium, as a source to pull from.

A bundle is one folder, or several media together:

    bundle.json        manifest, image digests, extra files with sha256, where each file begins
    SHA256SUMS         of bundle.json and every part, for `sha256sum -c`
    part-00001.tar...  one tar stream cut into parts: `cat part-*.tar | tar x` restores it by hand
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from appliance import durable
from appliance.errors import SourceError, UsageError
from appliance.weights import guard
from appliance.weights.folder import read_pieces
from appliance.weights.manifest import Manifest, Sha256, Strict
from appliance.weights.names import check_paths
from appliance.weights.source import Offer, Range, Wanted, offered

INDEX = "bundle.json"
WEIGHTS = "weights"
EXTRAS = "extras"


class Extra(Strict):
    """A file beside the weights: an image archive, the chart, documents."""

    path: str
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class Bundle(Strict):
    """The index. `offsets` are where each member's bytes begin in the stream, by member name.

    `images` maps an image's name to its digest (`sha256:...`); `chart` is its name and version.
    """

    schema_version: Literal[1] = 1
    manifest: Manifest
    images: dict[str, Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]]
    chart: str | None = None
    extras: tuple[Extra, ...]
    part_bytes: Annotated[int, Field(gt=0)]
    stream_bytes: Annotated[int, Field(ge=0)]
    offsets: dict[str, int]

    @property
    def parts(self) -> list[str]:
        return [part_name(i) for i in range(-(-self.stream_bytes // self.part_bytes))]

    def part_size(self, index: int) -> int:
        return min(self.part_bytes, self.stream_bytes - index * self.part_bytes)


def part_name(index: int) -> str:
    return f"part-{index + 1:05}.tar"


def read_bundle(folder: Path) -> Bundle:
    """Raises SourceError for an index that is missing, not ours, or changed."""
    path = folder / INDEX
    try:
        bundle = Bundle.model_validate_json(path.read_bytes())
        check_paths(extra.path for extra in bundle.extras)
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise SourceError(f"{path} is no valid bundle: {place}: {first['msg']}") from error
    members = [(f"{WEIGHTS}/{file.path}", file.size_bytes) for file in bundle.manifest.files]
    members += [(f"{EXTRAS}/{extra.path}", extra.size_bytes) for extra in bundle.extras]
    for name, size in members:
        start = bundle.offsets.get(name)
        if start is None or not 0 <= start <= bundle.stream_bytes - size:
            raise SourceError(f"{path} does not say where {name} is")
    return bundle


class BundleSource:
    """The weights of a bundle whose parts are in `folders`, one or several media."""

    def __init__(self, folders: Path | Sequence[Path]) -> None:
        self.folders = [folders] if isinstance(folders, Path) else list(folders)
        holders = [folder for folder in self.folders if (folder / INDEX).is_file()]
        if not holders:
            raise UsageError(f"no {INDEX} in {', '.join(map(str, self.folders))}")
        self.bundle = read_bundle(holders[0])
        self.name = f"bundle of {self.bundle.manifest.release_id}"

    def offer(self) -> Offer:
        return offered(self.bundle.manifest)

    @contextmanager
    def read(self, file: Wanted, start: int, stop: int) -> Iterator[Range]:
        offset = self.bundle.offsets[f"{WEIGHTS}/{file.path}"]
        yield Range(None, self.stream(offset + start, offset + stop))

    def close(self) -> None:
        """Nothing stays open between reads."""

    def stream(self, start: int, stop: int) -> Iterator[bytes]:
        """Bytes start..stop-1 of the tar stream, over the edges of parts."""
        while start < stop:
            index, inside = divmod(start, self.bundle.part_bytes)
            size = min(stop - start, self.bundle.part_size(index) - inside)
            path = self._part(index)
            descriptor = os.open(path, os.O_RDONLY)
            try:
                yield from read_pieces(descriptor, inside, inside + size, path)
            finally:
                os.close(descriptor)
            start += size

    def _part(self, index: int) -> Path:
        name = part_name(index)
        for folder in self.folders:
            if (folder / name).is_file():
                return folder / name
        raise SourceError(
            f"{name} ({index + 1} of {len(self.bundle.parts)}) is not in "
            f"{', '.join(map(str, self.folders))}",
            fix="connect the medium that has it and run this again: it resumes",
        )


def install_extras(source: BundleSource, folder: Path) -> list[Path]:
    """Write the bundle's extra files under `folder`, each proved before it has its name."""
    with guard.storing(folder):
        durable.make_folder(folder)
    with guard.alone_in(folder), guard.storing(folder):
        return [_install(source, extra, folder / extra.path) for extra in source.bundle.extras]


def _install(source: BundleSource, extra: Extra, target: Path) -> Path:
    durable.make_folder(target.parent)
    digest = hashlib.sha256()
    start = source.bundle.offsets[f"{EXTRAS}/{extra.path}"]
    with durable.writing(target, alone=True) as stream:
        for data in source.stream(start, start + extra.size_bytes):
            stream.write(data)
            digest.update(data)
        if digest.hexdigest() != extra.sha256:
            raise SourceError(
                f"{extra.path} in the bundle has sha256 {digest.hexdigest()}, not {extra.sha256}",
                fix="sha256sum -c SHA256SUMS says which part is damaged: copy it again",
            )
    return target
