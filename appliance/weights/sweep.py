"""What takes space, and giving it back: du, rm, gc. What a release needs is never removed."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass

from appliance import durable
from appliance.errors import UsageError
from appliance.weights.activate import previous
from appliance.weights.names import SHA256
from appliance.weights.store import Store


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes on the disk (`alone_bytes`: of blobs that no other release has)."""

    release: str
    size_bytes: int
    alone_bytes: int


@dataclass(frozen=True, slots=True)
class Swept:
    releases: tuple[str, ...]
    blobs: int
    staged: int
    freed_bytes: int


def usage(store: Store) -> tuple[list[Use], int, int]:
    """For each release its bytes; then bytes of blobs that no release has, and of staging."""
    disk = {name: found.st_blocks * 512 for name, found in store.blob_names()}
    blobs = {release: store.manifest(release).blobs for release in store.releases()}
    uses = []
    for release, mine in blobs.items():
        others = set().union(*(theirs for name, theirs in blobs.items() if name != release))
        uses.append(
            Use(
                release,
                sum(disk.get(blob, 0) for blob in mine),
                sum(disk.get(blob, 0) for blob in mine - others),
            )
        )
    orphans = disk.keys() - set().union(*blobs.values())
    staged = sum(p.lstat().st_blocks * 512 for p in store.staging.rglob("*"))
    return uses, sum(disk[blob] for blob in orphans), staged


def gc(store: Store, *, keep: Collection[str] = (), dry_run: bool = False) -> Swept:
    """Remove every release but the current, the previous and `keep`, and what is left over.

    Left over are blobs of no release, and what interrupted pulls have staged.
    """
    with store.pulling("gc"), store.changing("gc"):
        kept = {store.current(), previous(store), *keep}
        doomed = tuple(release for release in store.releases() if release not in kept)
        return _sweep(store, doomed, dry_run=dry_run, staging=True)


def rm(store: Store, release: str) -> Swept:
    """Remove one release and the blobs that only it has. The current one is refused."""
    with store.pulling("rm"), store.changing("rm"):
        if release == store.current():
            raise UsageError(
                f"{release} is the current release", fix="activate another one before you remove it"
            )
        return _sweep(store, (release,), dry_run=False, staging=False)


def _sweep(store: Store, doomed: tuple[str, ...], *, dry_run: bool, staging: bool) -> Swept:
    kept_blobs: set[str] = set()
    for release in store.releases():
        if release not in doomed:
            kept_blobs |= store.manifest(release).blobs
    blobs = [(name, found) for name, found in store.blob_names() if name not in kept_blobs]
    freed = sum(found.st_blocks * 512 for _, found in blobs)
    staged = list(store.staging.iterdir()) if staging else []
    freed += sum(p.lstat().st_blocks * 512 for path in staged for p in (path, *path.rglob("*")))
    if not dry_run:
        # A release loses its name before it loses a link, and its blobs go last.
        for release in doomed:
            trash = store.staging / f"removed-{release}"
            shutil.rmtree(trash, ignore_errors=True)
            store.release_folder(release).rename(trash)
            durable.sync_folder(store.releases_folder)
            shutil.rmtree(trash)
        for name, _ in blobs:
            (store.marks / name).unlink(missing_ok=True)
            store.blob(name).unlink()
        for path in staged:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _clear_asides(store)
    return Swept(doomed, len(blobs), len(staged), freed)


def _clear_asides(store: Store) -> None:
    """What killed processes left: files written aside, marks of blobs that are gone."""
    for folder in (store.folder, store.marks, store.releases_folder):
        for path in folder.glob(f".*{durable.ASIDE}"):
            path.unlink(missing_ok=True)
    for mark in store.marks.iterdir():
        if SHA256.fullmatch(mark.name) and not store.blob(mark.name).exists():
            mark.unlink()
