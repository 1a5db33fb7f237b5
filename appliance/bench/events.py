"""An HTTP/1.1 answer, as it came in pieces, -> its server-sent events with their arrival times.

Pure, and run after a stream has ended: while it flows the client only notes the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

DONE = b"[DONE]"


@dataclass
class Decoder:
    """Feed it pieces in order. `status` is None until the headers are whole."""

    status: int | None = None
    body: bytearray = field(default_factory=bytearray)  # of an answer that is no event stream
    chunked: bool = False
    is_events: bool = False
    finished: bool = False  # the last chunk, or [DONE], was seen
    _raw: bytearray = field(default_factory=bytearray)
    _line: bytearray = field(default_factory=bytearray)
    _left: int = 0  # bytes of the chunk at hand that have not come

    def feed(self, piece: bytes) -> list[bytes]:
        """The payloads of the `data:` lines that this piece completes."""
        self._raw += piece
        if self.status is None and not self._read_headers():
            return []
        plain = self._unchunk() if self.chunked else bytes(self._raw)
        if not self.chunked:
            self._raw.clear()
        if not self.is_events:
            self.body += plain
            return []
        self._line += plain
        *lines, rest = self._line.split(b"\n")
        self._line = bytearray(rest)
        found = [bytes(line[5:].strip()) for line in lines if line.startswith(b"data:")]
        self.finished = self.finished or DONE in found
        return [payload for payload in found if payload and payload != DONE]

    def _read_headers(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *rest = bytes(self._raw[:end]).split(b"\r\n")
        del self._raw[: end + 4]
        words = first.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
            raise ValueError(f"no HTTP answer: {first[:80]!r}")
        headers = {
            name.strip().lower(): value.strip().lower()
            for name, _, value in (line.partition(b":") for line in rest)
        }
        self.status = int(words[1])
        self.chunked = headers.get(b"transfer-encoding") == b"chunked"
        self.is_events = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        return True

    def _unchunk(self) -> bytes:
        plain = bytearray()
        while self._raw:
            if self._left:
                taken = self._raw[: self._left]
                plain += taken
                del self._raw[: len(taken)]
                self._left -= len(taken)
                continue
            end = self._raw.find(b"\r\n")
            if end < 0:
                break
            size_text = bytes(self._raw[:end]).partition(b";")[0].strip()
            del self._raw[: end + 2]
            if size_text:  # empty: the line end that closes a chunk
                self._left = int(size_text, 16)
                self.finished = self.finished or self._left == 0
        return bytes(plain)


def decode(
    pieces: Iterable[tuple[float, bytes]], decoder: Decoder
) -> Iterator[tuple[float, bytes]]:
    """(arrival time, payload) of every event. Raises ValueError on what is not HTTP."""
    for when, piece in pieces:
        for payload in decoder.feed(piece):
            yield when, payload
