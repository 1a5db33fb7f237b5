"""Files over HTTP by ranges: which answers are bytes of the file, and which are anything else."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from appliance.errors import SourceError
from appliance.weights.network import Network
from appliance.weights.source import Again, Range, RangeRefused
from appliance.weights.transport import (
    Answer,
    Authorize,
    Client,
    pieces,
    retry_after,
    shown,
)

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_PASSING = (408, 425, 429, 500, 502, 503, 504)


class Ranges:
    """Ranged reads and small documents from one host, by any number of threads."""

    def __init__(self, home: str, network: Network, authorize: Authorize) -> None:
        self.network = network
        self._home = home
        self._authorize = authorize
        self._mine = threading.local()
        self._clients: list[Client] = []
        # A hub answers with a redirect to a signed address, good for a while: asked once a file.
        self._resolved: dict[str, str] = {}

    @contextmanager
    def read(self, url: str, start: int, stop: int, size_bytes: int) -> Iterator[Range]:
        """Bytes start..stop-1 of the file at `url`, which has `size_bytes` in all."""
        at = self._resolved.get(url, url)
        with self._client().get(at, {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            if at != url and answer.status in (400, 401, 403, 404, 410):
                self._resolved.pop(url, None)
                raise Again(f"{shown(at)}: {answer.status}: the redirect is no longer good")
            self._check(answer, start, stop, size_bytes)
            if answer.url != url:
                self._resolved[url] = answer.url
            tag = answer.headers.get("ETag")
            yield Range(tag, pieces(answer, stop - start, self.network.stall_seconds))

    def document(self, url: str, max_bytes: int) -> bytes | None:
        """A whole small document, None where there is none (404)."""
        with self._client().get(url, {}) as answer:
            if answer.status == 404:
                return None
            refuse(answer, {200})
            _refuse_encoding(answer)
            content = answer.read(max_bytes + 1)
            if len(content) > max_bytes:
                raise SourceError(f"{shown(url)} has more than {max_bytes:,} bytes")
            length = answer.headers.get("Content-Length")
            if length is not None and int(length) != len(content):
                raise Again(f"{shown(url)}: {len(content)} of {length} bytes came")
            return content

    def size(self, url: str) -> int:
        """Bytes of a file whose size nobody says, from the answer to a range of one byte."""
        with self._client().get(url, {"Range": "bytes=0-0"}) as answer:
            if answer.status == 416 and answer.headers.get("Content-Range") == "bytes */0":
                return 0
            refuse(answer, {206})
            found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range") or "")
            if found is None:
                raise SourceError(f"{shown(url)} does not say its size in Content-Range")
            return int(found[3])

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _client(self) -> Client:
        client: Client | None = getattr(self._mine, "client", None)
        if client is None:
            client = self._mine.client = Client(self.network, self._home, self._authorize)
            self._clients.append(client)
        return client

    def _check(self, answer: Answer, start: int, stop: int, size_bytes: int) -> None:
        whole = start == 0 and stop == size_bytes
        if answer.status == 416:
            raise RangeRefused(
                f"{shown(answer.url)} has no bytes {start} to {stop - 1} "
                f"(416, {answer.headers.get('Content-Range') or 'no size given'})"
            )
        refuse(answer, {200, 206})
        _refuse_encoding(answer)
        if answer.status == 206:
            _check_content_range(answer, start, stop, size_bytes)
        elif not whole:
            raise SourceError(
                f"{shown(answer.url)} does not do ranges: it answers 200 with the whole file",
                fix="use a server that does, or copy the folder and pull from there",
            )
        length = answer.headers.get("Content-Length")
        if length is not None and length != str(stop - start):
            raise Again(f"{shown(answer.url)} sends {length} bytes for a range of {stop - start}")


def refuse(answer: Answer, good: set[int]) -> None:
    """Raise what a status means: Again where it passes, a sentence with the way out elsewhere."""
    if answer.status in good:
        return
    where = shown(answer.url)
    if answer.status in _PASSING:
        raise Again(f"{where}: {answer.status}", after_seconds=retry_after(answer.headers))
    if answer.status in (401, 403):
        raise SourceError(
            f"{where}: {answer.status}: not allowed"
            + (" with the token that was sent" if answer.token_sent else " without a token"),
            fix="accept the model's licence on its page, and put a token that may read it in "
            "HF_TOKEN_PATH or HF_TOKEN (the hub) or APPLIANCE_WEIGHTS_TOKEN_FILE (a mirror)",
        )
    if answer.status == 404:
        raise SourceError(f"{where}: 404: there is no such file or model")
    raise SourceError(f"{where}: {answer.status} {answer.raw.reason}")


def _refuse_encoding(answer: Answer) -> None:
    encoding = answer.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise SourceError(
            f"{shown(answer.url)} answers in {encoding} though identity was asked for",
            fix="turn compression off for these files on the server or the proxy",
        )


def _check_content_range(answer: Answer, start: int, stop: int, size_bytes: int) -> None:
    text = answer.headers.get("Content-Range") or ""
    found = _CONTENT_RANGE.fullmatch(text)
    if found is None or (int(found[1]), int(found[2])) != (start, stop - 1):
        raise Again(f"{shown(answer.url)} answers {text!a} to a request for {start}-{stop - 1}")
    if int(found[3]) != size_bytes:
        raise RangeRefused(
            f"{shown(answer.url)} has {int(found[3]):,} bytes now, {size_bytes:,} were promised"
        )
