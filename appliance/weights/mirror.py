"""A mirror: any HTTP(S) server with ranges that has a release's files and its manifest, or sums.

`weights serve` on another machine is one, a published release folder too. Without our manifest the
folder needs SHA256SUMS as `sha256sum` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote, urlsplit

from appliance.errors import SourceError
from appliance.weights.manifest import MAX_MANIFEST_BYTES, load_manifest
from appliance.weights.names import MANIFEST, check_paths
from appliance.weights.network import Network
from appliance.weights.ranges import Ranges
from appliance.weights.source import Offer, Range, Wanted, offered
from appliance.weights.transport import Authorize, bearer, check_address, shown

SUMS = "SHA256SUMS"
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")


class MirrorSource:
    """`url` is the folder's address; its query, if any (a signature), goes with every request."""

    def __init__(self, url: str, network: Network, authorize: Authorize | None = None) -> None:
        check_address(url)
        self.name = shown(url).rstrip("/")
        parts = urlsplit(url)
        self._base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/"
        self._query = f"?{parts.query}" if parts.query else ""
        self._ranges = Ranges(url, network, authorize or bearer(network.mirror_token))

    def offer(self) -> Offer:
        content = self._ranges.document(self._url(MANIFEST), MAX_MANIFEST_BYTES)
        if content is not None:
            return offered(load_manifest(content, f"{self.name}/{MANIFEST}"))
        content = self._ranges.document(self._url(SUMS), MAX_MANIFEST_BYTES)
        if content is None:
            raise SourceError(
                f"{self.name} has neither {MANIFEST} nor {SUMS}",
                fix="publish a release folder, or write sums: sha256sum * > SHA256SUMS",
            )
        sums = parse_sums(content, f"{self.name}/{SUMS}")
        check_paths(sums)
        files = tuple(
            Wanted(path, self._ranges.size(self._url(path)), sha256=sha256)
            for path, sha256 in sums.items()
        )
        return Offer(self.name.rpartition("/")[2], None, None, files)

    @contextmanager
    def read(self, file: Wanted, start: int, stop: int) -> Iterator[Range]:
        with self._ranges.read(self._url(file.path), start, stop, file.size_bytes) as found:
            yield found

    def close(self) -> None:
        self._ranges.close()

    def _url(self, path: str) -> str:
        return self._base + quote(path) + self._query


def parse_sums(content: bytes, where: str) -> dict[str, str]:
    """Path -> sha256 from the output of `sha256sum`."""
    sums: dict[str, str] = {}
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        found = _SUM.fullmatch(line)
        path = found[2].removeprefix("./") if found else ""
        if found is None or path in sums:
            raise SourceError(f"{where}, line {number}: not `sha256  name`, or a name twice")
        sums[path] = found[1]
    if not sums:
        raise SourceError(f"{where} is empty")
    return sums
