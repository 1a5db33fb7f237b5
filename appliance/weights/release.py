"""Make a release of blobs: links and manifest in a folder aside, headers read, then one rename."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from appliance import durable
from appliance.checkpoint.exl3 import read_checkpoint
from appliance.errors import WeightsError
from appliance.weights import guard
from appliance.weights.manifest import File, Manifest, Summary
from appliance.weights.names import MANIFEST
from appliance.weights.store import Store


def link_target(file: File) -> str:
    """Where the release's link for `file` leads, relative to the link."""
    up = "../" * (2 + file.path.count("/"))
    return f"{up}blobs/{file.sha256[:2]}/{file.sha256}"


def commit_release(store: Store, manifest: Manifest) -> Manifest:
    """The release under its id, complete; the manifest comes back with what the headers say.

    Raises CheckpointError where headers do not parse or the index and the shards disagree; then
    the blobs stay, and no release is made. Does nothing where the release is there already.
    """
    final = store.release_folder(manifest.release_id)
    if final.is_dir():
        return _adopt_signature(store, manifest)
    for file in manifest.files:
        found = os.lstat(store.blob(file.sha256))
        if found.st_size != file.size_bytes:
            raise WeightsError(
                f"the blob of {file.path} has {found.st_size} bytes, not as many as "
                f"its manifest says ({file.size_bytes})"
            )
    # Same depth as releases/<id>, so that the links are right before and after the rename.
    aside = store.staging / f"release-{manifest.release_id}"
    if aside.exists():
        shutil.rmtree(aside)
    with guard.storing(store.folder):
        _link_files(aside, manifest)
        summary = Summary.of(read_checkpoint(aside))
        complete = manifest.model_copy(update={"checkpoint": summary})
        durable.write_file(aside / MANIFEST, complete.to_json())
        with store.changing("a new release"):
            if not final.is_dir():
                aside.rename(final)
                durable.sync_folder(store.releases_folder)
    return store.manifest(manifest.release_id)


def _adopt_signature(store: Store, manifest: Manifest) -> Manifest:
    """The release is there; where it came signed this time, it is signed from now on."""
    there = store.manifest(manifest.release_id)
    if manifest.signature in (None, there.signature):
        return there
    with store.changing("a signature"):
        signed = manifest.model_copy(update={"checkpoint": there.checkpoint})
        write_manifest(store, signed)
    return signed


def write_manifest(store: Store, manifest: Manifest) -> None:
    """In place of the one that the release had: the same files, otherwise described."""
    path = store.release_folder(manifest.release_id) / MANIFEST
    durable.write_file(path, manifest.to_json())


def check_release(store: Store, release: str, manifest: Manifest | None = None) -> list[str]:
    """What is wrong with a release besides the bytes of its blobs; sentences."""
    folder = store.release_folder(release)
    manifest = manifest or store.manifest(release)
    problems = []
    try:
        store.check_signature(manifest, "the manifest")
    except WeightsError as error:
        problems.append(error.message)
    if manifest.release_id != release:
        problems.append(f"the manifest is not the one of {release}: it was changed")
    wanted = {file.path: file for file in manifest.files}
    present = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    for path in sorted(present.keys() - wanted.keys() - {MANIFEST}):
        problems.append(f"{path} does not belong to the release")
    for path, file in wanted.items():
        if path not in present:
            problems.append(f"{path} is missing")
        elif not present[path].is_symlink() or str(present[path].readlink()) != link_target(file):
            problems.append(f"{path} is not the link to its blob that it should be")
        elif not store.blob(file.sha256).is_file() or store.blob(file.sha256).is_symlink():
            problems.append(f"the blob of {path} is missing")
    return problems


def _link_files(folder: Path, manifest: Manifest) -> None:
    folder.mkdir()
    folders = {folder}
    for file in manifest.files:
        link = folder / file.path
        for parent in reversed(link.relative_to(folder).parents):
            (folder / parent).mkdir(exist_ok=True)
            folders.add(folder / parent)
        link.symlink_to(link_target(file))
    for each in sorted(folders, reverse=True):
        durable.sync_folder(each)
