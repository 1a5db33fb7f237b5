"""The store on disk: blobs by sha256, releases of links to them, one `current`.

    FORMAT                       version of this layout
    blobs/ab/ab12...             one file's bytes, named by their sha256, read-only
    releases/<model@digest>/     a model's folder: links to blobs, and appliance-manifest.json
    current -> releases/...      moved by rename; what the engine serves
    history                      a line for each activation
    marks/<sha256>               what a blob looked like when its bytes were last proved
    staging/                     what is on its way: parts, journals, folders not yet renamed
    locks/                       pull (long), change (short)

A blob is complete and proved before it has its name; a release has all its blobs, and headers that
parse, before it has its name. So nothing under blobs or releases is ever half there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from appliance import durable
from appliance.errors import UsageError, WeightsError
from appliance.weights import guard
from appliance.weights.manifest import Manifest, read_manifest
from appliance.weights.names import MANIFEST, SHA256
from appliance.weights.signature import Keys

FORMAT = "moe-appliance weights 1\n"
CHANGE_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Store:
    """Paths of one store; every method that answers reads the disk anew.

    With `keys`, nothing that none of them signed is pulled, verified or activated.
    """

    folder: Path
    keys: Keys | None = None

    @property
    def releases_folder(self) -> Path:
        return self.folder / "releases"

    @property
    def staging(self) -> Path:
        return self.folder / "staging"

    @property
    def marks(self) -> Path:
        return self.folder / "marks"

    @property
    def history(self) -> Path:
        return self.folder / "history"

    @property
    def pointer(self) -> Path:
        return self.folder / "current"

    def blob(self, sha256: str) -> Path:
        return self.folder / "blobs" / sha256[:2] / sha256

    def release_folder(self, release: str) -> Path:
        return self.releases_folder / release

    def releases(self) -> list[str]:
        """Ids of every complete release, sorted."""
        return sorted(path.name for path in self.releases_folder.iterdir() if "@" in path.name)

    def manifest(self, release: str) -> Manifest:
        return read_manifest(self.release_folder(release) / MANIFEST)

    def check_signature(self, manifest: Manifest | None, where: str) -> None:
        """Raises WeightsError where this store has keys and none of them signed the manifest."""
        if self.keys is not None:
            self.keys.check(manifest, where)

    def find(self, name: str | None) -> str:
        """The one release that `name` means: an id, the start of one, or None for the current."""
        if name is None:
            current = self.current()
            if current is None:
                raise UsageError("no release is active", fix="appliance weights activate RELEASE")
            return current
        known = self.releases()
        if name in known:
            return name
        found = [release for release in known if name and release.startswith(name)]
        if len(found) == 1:
            return found[0]
        what = f"is the start of {len(found)} releases" if found else "is no release of this store"
        raise UsageError(f"{name!a} {what}", fix="one of: " + (", ".join(found or known) or "none"))

    def current(self) -> str | None:
        """The active release. Raises WeightsError if the pointer leads nowhere."""
        try:
            target = str(self.pointer.readlink())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WeightsError(f"{self.pointer} is not a link: {error.strerror}") from error
        release = target.removeprefix("releases/")
        if release not in self.releases():
            raise WeightsError(
                f"{self.pointer} leads to {target!a}, which is no release of this store",
                fix="appliance weights activate RELEASE",
            )
        return release

    def blob_names(self) -> Iterator[tuple[str, os.stat_result]]:
        """Every blob's sha256 and what the file system says of it."""
        for folder in sorted((self.folder / "blobs").iterdir()):
            for path in sorted(folder.iterdir()):
                if SHA256.fullmatch(path.name):
                    yield path.name, path.lstat()

    @contextmanager
    def pulling(self, what: str) -> Iterator[None]:
        """Nobody else fetches into, or sweeps, this store meanwhile."""
        with (
            guard.storing(self.folder),
            guard.locked(self.folder / "locks" / "pull", what),
        ):
            yield

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Nobody else moves `current` or adds or removes a release meanwhile; short."""
        path = self.folder / "locks" / "change"
        with (
            guard.storing(self.folder),
            guard.locked(path, what, patience_seconds=CHANGE_PATIENCE_SECONDS),
        ):
            yield


def open_store(folder: Path, keys: Keys | None = None) -> Store:
    """An existing store. Raises WeightsError where there is none, or a newer one."""
    store = Store(folder.absolute(), keys)
    try:
        found = (store.folder / "FORMAT").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise WeightsError(
            f"{folder} is no store of weights",
            fix="appliance weights pull SOURCE makes one, --store DIR chooses another",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"cannot read {folder / 'FORMAT'}: {error}") from error
    if found != FORMAT:
        raise WeightsError(
            f"{folder} has the format {found.strip()!a}; this version knows {FORMAT.strip()!a}"
        )
    return store


def make_store(folder: Path, keys: Keys | None = None) -> Store:
    """The store at `folder`, made if there is none; a folder that holds other things is refused."""
    store = Store(folder.absolute(), keys)
    if (store.folder / "FORMAT").exists():
        return open_store(folder, keys)
    with guard.storing(store.folder):
        durable.make_folder(store.folder)
        ours = {"blobs", "releases", "staging", "marks", "locks"}
        strange = sorted(
            path.name
            for path in store.folder.iterdir()
            if path.name not in {*ours, "lost+found"} and not path.name.endswith(durable.ASIDE)
        )
        if strange:
            raise WeightsError(
                f"{folder} is no store of weights and holds {strange[0]!a}",
                fix="choose an empty folder with --store",
            )
        for name in sorted(ours):
            durable.make_folder(store.folder / name)
        # Last: a store that was killed while it was made is made again.
        durable.write_file(store.folder / "FORMAT", FORMAT.encode())
    return store
