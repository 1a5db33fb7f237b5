"""A folder or removable disk: a release of ours, a folder with sums, or bare files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from appliance.checkpoint.strictjson import GET_THE_FILE, LFS_POINTER
from appliance.errors import SourceError
from appliance.weights.manifest import Manifest, read_manifest
from appliance.weights.mirror import SUMS, parse_sums
from appliance.weights.names import MANIFEST, check_paths
from appliance.weights.source import Offer, Range, Wanted, offered

PIECE_BYTES = 1 << 20
CONFIG = "config.json"


class FolderSource:
    """Files under `folder`. Without manifest or sums, their bytes are taken as they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.name = str(self.folder)

    def offer(self) -> Offer:
        if (self.folder / MANIFEST).is_file():
            manifest: Manifest = read_manifest(self.folder / MANIFEST)
            return offered(manifest)
        return self.as_it_lies()

    def as_it_lies(self) -> Offer:
        """The files that are there, whatever a manifest beside them says of them."""
        if not (self.folder / CONFIG).is_file():
            raise SourceError(f"{self.folder} has no {CONFIG}: it is no model's folder")
        paths = sorted(
            path.relative_to(self.folder).as_posix()
            for path in self.folder.rglob("*")
            if (not path.is_dir() or path.is_symlink()) and path != self.folder / MANIFEST
        )
        sums: dict[str, str] = {}
        if SUMS in paths:
            sums = parse_sums((self.folder / SUMS).read_bytes(), str(self.folder / SUMS))
            paths = sorted(sums)
        check_paths(paths)
        if not paths:
            raise SourceError(f"{self.folder} has no files")
        files = tuple(self._wanted(path, sums.get(path)) for path in paths)
        return Offer(self.folder.name, None, None, files)

    @contextmanager
    def read(self, file: Wanted, start: int, stop: int) -> Iterator[Range]:
        path = self._inside(file.path)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise SourceError(f"cannot read {path}: {error.strerror}") from error
        try:
            found = os.fstat(descriptor)
            tag = f"{found.st_size}-{found.st_ino}-{found.st_mtime_ns}"
            yield Range(tag, read_pieces(descriptor, start, stop, path))
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Nothing stays open between reads."""

    def _wanted(self, path: str, sha256: str | None) -> Wanted:
        file = self._inside(path)
        try:
            found = file.stat()
            with file.open("rb") as stream:
                start = stream.read(len(LFS_POINTER)) if stat.S_ISREG(found.st_mode) else b""
        except OSError as error:
            raise SourceError(f"cannot read {file}: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise SourceError(f"{file} is no regular file: refused")
        if start == LFS_POINTER:
            raise SourceError(
                f"{file} is a Git LFS pointer of {found.st_size} bytes, not the file",
                fix=GET_THE_FILE,
            )
        version = f"{file} {found.st_ino} {found.st_mtime_ns}"
        return Wanted(path, found.st_size, sha256=sha256, version=version)

    def _inside(self, path: str) -> Path:
        """The file, links followed as long as they stay in the folder or its cache's blobs."""
        file = self.folder / path
        real = Path(os.path.realpath(file))
        roots = [Path(os.path.realpath(self.folder))]
        # Releases of ours link to ../../blobs, as snapshots of the hub's own cache do.
        if roots[0].parent.name in ("releases", "snapshots"):
            roots.append(roots[0].parent.parent / "blobs")
        if not any(real.is_relative_to(root) for root in roots):
            raise SourceError(f"{file} is a link that leads out of the folder: refused")
        return real


def read_pieces(descriptor: int, start: int, stop: int, path: Path) -> Iterator[bytes]:
    try:
        while start < stop:
            data = os.pread(descriptor, min(PIECE_BYTES, stop - start), start)
            if not data:
                raise SourceError(f"{path} ends at byte {start:,}, before {stop:,}")
            start += len(data)
            yield data
    except OSError as error:
        raise SourceError(
            f"cannot read {path} at byte {start:,}: {error.strerror}",
            fix="the disk may be failing: look in the kernel's log",
        ) from error
