"""Where weights come from: what every source offers, and how one is named on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from appliance.errors import SourceError, UsageError
from appliance.weights.manifest import Manifest
from appliance.weights.network import Network


@dataclass(frozen=True, slots=True)
class Wanted:
    """One file on offer. What the source does not say is None; `git_oid` is sha1 as git counts it,
    `chunks` are as in Manifest, `version` tells a file without any hash from another of its name.
    """

    path: str
    size_bytes: int
    sha256: str | None = None
    git_oid: str | None = None
    chunks: tuple[str, ...] | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """`manifest` is the one that the source has, signature and all; None where it has none."""

    model: str
    revision: str | None
    licence: str | None
    files: tuple[Wanted, ...]
    manifest: Manifest | None = None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes as they come; `tag` names the version of the file that they belong to (an ETag)."""

    tag: str | None
    pieces: Iterator[bytes]


class Source(Protocol):
    """`name` is safe to show and to keep: no credentials in it.

    `read` gives bytes start..stop-1 of a file, exactly as many or an error. Threads may read at
    once. Errors: Again where trying again may help, RangeRefused where the file is shorter than
    promised, SourceError for the rest. `close` ends all connections; a later read opens new ones.
    """

    name: str

    def offer(self) -> Offer: ...

    def read(self, file: Wanted, start: int, stop: int) -> AbstractContextManager[Range]: ...

    def close(self) -> None: ...


class Again(SourceError):
    """It failed, and may succeed later: after `after_seconds`, where the source said so."""

    def __init__(self, message: str, *, after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.after_seconds = after_seconds


class RangeRefused(SourceError):
    """416: the source has fewer bytes of this file than it promised."""


class FileChanged(SourceError):
    """The file is another one than when its first byte was fetched."""


def offered(manifest: Manifest) -> Offer:
    """A manifest of ours as an offer: everything is known."""
    return Offer(
        manifest.model,
        manifest.revision,
        manifest.licence,
        tuple(
            Wanted(file.path, file.size_bytes, sha256=file.sha256, chunks=file.chunks)
            for file in manifest.files
        ),
        manifest,
    )


def open_source(text: str, network: Network) -> Source:
    """`hf:ORG/NAME[@REVISION]`, `https://...`, `http://...`, `s3://BUCKET/PREFIX` or a folder."""
    scheme, separator, rest = text.partition(":")
    opener = _OPENERS.get(scheme) if separator else None
    if opener is not None:
        return opener(text, rest, network)
    folder = Path(text)
    if not folder.is_dir():
        ways = "hf:ORG/NAME[@REVISION], https://..., http://..., s3://BUCKET/PREFIX or a folder"
        raise UsageError(f"{text!a} is neither a folder nor the address of a source", fix=ways)
    if (folder / "bundle.json").is_file():
        from appliance.weights.bundle import BundleSource

        return BundleSource(folder)
    from appliance.weights.folder import FolderSource

    return FolderSource(folder)


def _hub(text: str, rest: str, network: Network) -> Source:
    from appliance.weights.hub import HubSource

    name, _, revision = rest.partition("@")
    return HubSource(name, revision or None, network)


def _mirror(text: str, rest: str, network: Network) -> Source:
    from appliance.weights.mirror import MirrorSource

    return MirrorSource(text, network)


def _s3(text: str, rest: str, network: Network) -> Source:
    from appliance.weights.s3 import s3_source

    return s3_source(rest, network)


_OPENERS: dict[str, Callable[[str, str, Network], Source]] = {
    "hf": _hub,
    "https": _mirror,
    "http": _mirror,
    "s3": _s3,
}
