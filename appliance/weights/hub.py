"""The Hugging Face hub, by its documented HTTP endpoints.

Metadata: /api/models/ID/revision/REV?blobs=true (sizes, sha256 of large files, git ids of small
ones). Bytes: /ID/resolve/COMMIT/PATH, which redirects to a signed address on another host; the
token stays here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from appliance.checkpoint.strictjson import parse
from appliance.errors import CheckpointError, SourceError, UsageError
from appliance.weights.names import SHA256
from appliance.weights.network import Network
from appliance.weights.ranges import Ranges
from appliance.weights.source import Offer, Range, Wanted
from appliance.weights.transport import bearer

MAX_METADATA_BYTES = 64 << 20
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_SHA1 = re.compile(r"[0-9a-f]{40}")


class HubSource:
    """One revision of one model; without a revision, what `main` is now."""

    def __init__(self, model: str, revision: str | None, network: Network) -> None:
        if not _NAME.fullmatch(model):
            raise UsageError(f"hf:{model} is not hf:ORG/NAME[@REVISION]")
        self._model = model
        self._revision = revision or "main"
        self._base = network.hub_url.rstrip("/")
        self._commit: str | None = None
        self._ranges = Ranges(self._base, network, bearer(network.hub_token))
        self.name = f"hf:{model}@{self._revision}"

    def offer(self) -> Offer:
        url = (
            f"{self._base}/api/models/{self._model}/revision/"
            f"{quote(self._revision, safe='')}?blobs=true"
        )
        content = self._ranges.document(url, MAX_METADATA_BYTES)
        if content is None:
            raise SourceError(f"the hub has no {self._model} at {self._revision}")
        try:
            found = parse(content, f"the hub's answer about {self.name}")
        except CheckpointError as error:
            raise SourceError(error.message) from error
        if not isinstance(found, dict) or not _SHA1.fullmatch(str(found.get("sha"))):
            raise SourceError(f"the hub's answer about {self.name} names no commit")
        commit = self._commit = str(found["sha"])
        self.name = f"hf:{self._model}@{commit}"
        siblings = found.get("siblings")
        if not isinstance(siblings, list) or not siblings:
            raise SourceError(f"{self.name} has no files")
        card = found.get("cardData")
        licence = card.get("license") if isinstance(card, dict) else None
        return Offer(
            model=self._model,
            revision=commit,
            licence=licence if isinstance(licence, str) else None,
            files=tuple(_wanted(entry, self.name) for entry in siblings),
        )

    @contextmanager
    def read(self, file: Wanted, start: int, stop: int) -> Iterator[Range]:
        if self._commit is None:
            self.offer()
        url = f"{self._base}/{self._model}/resolve/{self._commit}/{quote(file.path)}"
        with self._ranges.read(url, start, stop, file.size_bytes) as found:
            yield found

    def close(self) -> None:
        self._ranges.close()


def _wanted(entry: Any, where: str) -> Wanted:
    """A file from the hub's list; without a hash to hold it against it is refused."""
    lfs = entry.get("lfs") if isinstance(entry, dict) else None
    path = entry.get("rfilename") if isinstance(entry, dict) else None
    size = lfs.get("size") if isinstance(lfs, dict) else entry.get("size") if path else None
    sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
    oid = None if isinstance(lfs, dict) else entry.get("blobId") if path else None
    if not isinstance(path, str) or type(size) is not int or size < 0:
        raise SourceError(f"{where}: the hub lists a file without name or size: {path!a}")
    good = SHA256.fullmatch(str(sha256)) if sha256 is not None else _SHA1.fullmatch(str(oid))
    if not good:
        raise SourceError(f"{where}: the hub gives no hash for {path!a}")
    return Wanted(path, size, sha256=sha256, git_oid=oid)
