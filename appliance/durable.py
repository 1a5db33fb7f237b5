"""Writes that survive kill -9 and power loss: aside, synced, renamed, folder synced.

The one place that writes files which others read while they are replaced. It raises OSError as the
system does, with the name of the file that was to be written: what a full disk means for a plan or
a store is said by whoever writes it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

ASIDE = ".aside"  # what a killed process leaves behind ends so
READABLE, OWNER_ONLY = 0o644, 0o600
# What only a write can meet, and what the system says without a name.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def naming(path: Path, aside: Path | None = None) -> Iterator[None]:
    """An OSError of writing `path` names it: where the disk is full, and in place of `aside`."""
    try:
        yield
    except OSError as error:
        unnamed = error.filename is None and error.errno in FULL
        if unnamed or (aside is not None and error.filename in (str(aside), aside)):
            error.filename = str(path)
            del error.filename2  # None would be shown
        raise


def sync_folder(folder: Path) -> None:
    """Make renames, links and deletions in `folder` survive power loss."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """A folder and its parents, each synced into its own parent."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def write_file(path: Path, content: bytes, *, mode: int = READABLE, synced: bool = True) -> None:
    """`path` holds all of `content` or what it held before, whenever the process is killed.

    With `synced`, whenever the power goes too; without, power loss may leave any of it, or zeros.
    """
    with writing(path, mode=mode, synced=synced) as stream:
        stream.write(content)


@contextmanager
def writing(
    path: Path, *, mode: int = READABLE, synced: bool = True, alone: bool = False
) -> Iterator[BinaryIO]:
    """A stream whose bytes are `path` once the block ends well; until then, and where it does not
    end well, `path` is what it was before.

    `alone`: nobody else writes `path` meanwhile. The file aside then has one name, so that the next
    run takes the place of what a killed one left, which for a large file matters. A device or a
    pipe, such as /dev/stdout, is written and not replaced.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        with naming(path), path.open("wb") as stream:
            yield stream
        return
    aside = path.with_name(f".{path.name[:100]}{ASIDE}") if alone else _aside(path)
    way = os.O_TRUNC if alone else os.O_EXCL
    with naming(path, aside):
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | way, mode)
        try:
            with open(descriptor, "wb") as stream:
                yield stream
                stream.flush()
                if synced:
                    os.fsync(stream.fileno())
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        if synced:
            sync_folder(path.parent)


def point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`, in one step if it exists already."""
    aside = _aside(link)
    aside.symlink_to(target)
    try:
        aside.replace(link)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(link.parent)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}.{os.urandom(4).hex()}{ASIDE}")
