"""A source whose bytes are held against a manifest that came by another way, signed or not.

The hub has no manifests of ours and no signatures; who publishes a model there can hand out a
signed one, and the hub then only carries bytes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from appliance.errors import SourceError
from appliance.weights.manifest import Manifest
from appliance.weights.source import Offer, Range, Source, Wanted, offered


class HeldSource:
    """The files of `manifest`, from `source`; what else the source has is not asked for."""

    def __init__(self, source: Source, manifest: Manifest) -> None:
        self._source, self._manifest = source, manifest
        self.name = source.name

    def offer(self) -> Offer:
        there = {file.path: file for file in self._source.offer().files}
        self.name = self._source.name
        for file in self._manifest.files:
            found = there.get(file.path)
            if found is None:
                raise SourceError(f"{self.name} has no {file.path}, which the manifest names")
            same_hash = found.sha256 in (None, file.sha256)
            if found.size_bytes != file.size_bytes or not same_hash:
                raise SourceError(
                    f"{self.name} has another {file.path} than the manifest: {found.size_bytes:,} "
                    f"bytes, sha256 {found.sha256}, not {file.size_bytes:,} and {file.sha256}",
                    fix="name the revision that the manifest was made of: hf:ORG/NAME@REVISION",
                )
        return offered(self._manifest)

    def read(self, file: Wanted, start: int, stop: int) -> AbstractContextManager[Range]:
        return self._source.read(file, start, stop)

    def close(self) -> None:
        self._source.close()
