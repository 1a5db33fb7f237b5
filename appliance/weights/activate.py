"""Switch `current` from one complete release to another, and back: one rename, whatever the size.

The history gets its line before the rename, so a kill between the two leaves a line that never
came true; `previous` reads it as such.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from appliance import durable
from appliance.errors import WeightsError
from appliance.weights.manifest import Strict
from appliance.weights.marks import clean_mark
from appliance.weights.release import check_release
from appliance.weights.store import Store

# A blob's name is its sha256, so it is found in any process, whatever its mounts call the store;
# the inode tells it from the same bytes in another store.
_BLOB_IN_PATH = re.compile(rb"/blobs/[0-9a-f]{2}/([0-9a-f]{64})")
_BLOB_IN_MAPS = re.compile(rb" (\d+) +/\S*/blobs/[0-9a-f]{2}/([0-9a-f]{64})")


class Switch(Strict):
    """A line of the history: at `time` (seconds since 1970) `old` was to become `new`."""

    time: float
    old: str | None
    new: str


@dataclass(frozen=True, slots=True)
class Users:
    """Processes that have blobs of a release open or mapped; `unseen` could not be looked into."""

    pids: tuple[int, ...]
    unseen: int


@dataclass(frozen=True, slots=True)
class Activation:
    """`old` was current before; `unseen` processes of other users may have it open or not."""

    old: str | None
    new: str
    unseen: int = 0


def activate(store: Store, release: str, *, in_use_is_fine: bool = False) -> Activation:
    """Make `release` current.

    Raises WeightsError where a blob is not proved, or an engine still has the old release open.
    """
    with store.changing(f"activation of {release}"):
        old = store.current() if store.pointer.is_symlink() else None
        _check_complete(store, release)
        if old == release:
            return Activation(old, release)
        unseen = _check_unused(store, old) if old is not None and not in_use_is_fine else 0
        switch = Switch(time=time.time(), old=old, new=release)
        _append(store.history, switch.model_dump_json())
        durable.point(store.pointer, f"releases/{release}")
        return Activation(old, release, unseen)


def previous(store: Store) -> str | None:
    """The release that was current before the current one, if it is still there."""
    current = store.current()
    for switch in reversed(read_history(store)):
        if switch.new == current and switch.old is not None:
            return switch.old if switch.old in store.releases() else None
    return None


def rollback(store: Store, *, in_use_is_fine: bool = False) -> Activation:
    """Make the previous release current again."""
    back = previous(store)
    if back is None:
        raise WeightsError(
            "there is no earlier release to go back to",
            fix="appliance weights ls, then appliance weights activate RELEASE",
        )
    return activate(store, back, in_use_is_fine=in_use_is_fine)


def read_history(store: Store) -> list[Switch]:
    """Every activation, oldest first; a line that a kill cut short is left out."""
    try:
        lines = store.history.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    switches = []
    for line in lines:
        try:
            switches.append(Switch.model_validate_json(line))
        except ValidationError:
            continue
    return switches


def users(store: Store, release: str) -> Users:
    """Who maps or has open a blob of this release. Source: proc(5), maps and fd."""
    # From the links, not from the manifest, which takes longer to read than /proc does.
    links = [link for link in store.release_folder(release).rglob("*") if link.is_symlink()]
    wanted = {(os.fsencode(link.readlink().name), link.stat().st_ino) for link in links}
    pids, unseen = [], 0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            if not wanted.isdisjoint(_blobs_of(process)):
                pids.append(int(process.name))
        except PermissionError:
            unseen += 1
        except OSError:
            continue  # it ended meanwhile
    return Users(tuple(sorted(pids)), unseen)


def _blobs_of(process: Path) -> Iterator[tuple[bytes, int]]:
    """sha256 and inode of every blob that a process has mapped or open, of whatever store."""
    for found in _BLOB_IN_MAPS.finditer((process / "maps").read_bytes()):
        yield found[2], int(found[1])
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if name := _BLOB_IN_PATH.search(os.fsencode(descriptor.readlink())):
                yield name[1], descriptor.stat().st_ino


def _check_complete(store: Store, release: str) -> None:
    manifest = store.manifest(release)
    problems = check_release(store, release, manifest)
    if problems:
        raise WeightsError(f"{release}: {problems[0]}", fix="pull it again")
    for file in manifest.files:
        if clean_mark(store, file.sha256) is None:
            raise WeightsError(
                f"{release}: {file.path} was written to since it was proved, or never proved",
                fix=f"appliance weights verify {release}",
            )


def _check_unused(store: Store, release: str) -> int:
    """Processes that could not be looked into; raises WeightsError for one that has it open."""
    found = users(store, release)
    if found.pids:
        raise WeightsError(
            f"{release} is in use by process {', '.join(map(str, found.pids))}",
            fix="stop the engine first (appliance down), or --force: it keeps what it has open",
        )
    return found.unseen


def _append(path: Path, line: str) -> None:
    new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        # After a line that a kill cut short, this one starts on its own.
        cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, f"{chr(10) if cut else ''}{line}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if new:
        durable.sync_folder(path.parent)
