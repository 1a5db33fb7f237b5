"""One streamed chat request over a plain socket: while it flows, only arrival times are noted.

asyncio's sockets and our own decoder, not httpx: 64 streams at 200 tokens a second are 12,800
pieces a second in one thread, and httpx spends longer on a piece than there is. One connection a
request, closed by the server. The clock starts when the request is handed to the kernel: tools keep
their connections open, and what this process does before (connecting, reading other answers) is
not what a user feels.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from appliance.bench.events import Decoder, decode
from appliance.errors import UsageError

YIELD_EVERY = 16  # events decoded before other streams are looked at again
UNFINISHED = ("no-answer", "cut-off", "no-tokens")  # a reset or a timeout says why
Message = dict[str, str]


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server. `extra` goes into every request body as it is.

    `tls`: what is trusted at an https address; None: what the system trusts.
    """

    url: str
    model: str
    key: str | None = None
    timeout_seconds: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    tls: ssl.SSLContext | None = field(default=None, compare=False, repr=False)

    def request(self, messages: list[Message], tokens: int) -> bytes:
        body = json.dumps(
            {
                "model": self.model,
                "messages": messages,
                "max_tokens": tokens,
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self.extra,
            }
        ).encode()
        host, path = urlsplit(self.url).netloc, urlsplit(self.url).path.rstrip("/")
        head = [f"POST {path}/chat/completions HTTP/1.1", f"Host: {host}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        if self.key is not None:
            head.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*head, "", ""]).encode() + body


@dataclass
class Answer:
    """What came back. Times are seconds from sending; `error` is a short name or None."""

    error: str | None = None
    detail: str | None = None
    text: str = ""
    token_times: list[float] = field(default_factory=list)
    latency: float = 0.0
    empty_chunks: int = 0
    usage: dict[str, Any] | None = None

    def fail(self, error: str, detail: str) -> Answer:
        self.error, self.detail = error, detail[:300]
        return self


class _Pieces(asyncio.Protocol):
    """Notes when each piece came, and nothing else."""

    def __init__(self) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(exc)


async def ask(endpoint: Endpoint, messages: list[Message], tokens: int) -> Answer:
    """Send one request and wait for its end. Failures are in the answer, not raised."""
    url = urlsplit(endpoint.url)
    if url.scheme not in ("http", "https") or url.hostname is None:
        raise UsageError(f"{endpoint.url!r} is no address", fix="--url http://127.0.0.1:8000/v1")
    secure = url.scheme == "https"
    request = endpoint.request(messages, tokens)
    loop = asyncio.get_running_loop()
    answer = Answer()
    sent = time.perf_counter()
    transport, reason = None, None
    seen: list[tuple[float, bytes]] = []
    try:
        async with asyncio.timeout(endpoint.timeout_seconds):
            transport, protocol = await loop.create_connection(
                _Pieces,
                url.hostname,
                url.port or (443 if secure else 80),
                ssl=(endpoint.tls or True) if secure else None,
            )
            seen = protocol.pieces
            sent = time.perf_counter()
            transport.write(request)
            lost = await protocol.closed
            reason = None if lost is None else ("reset", str(lost) or type(lost).__name__)
    except TimeoutError:
        reason = ("timeout", f"no end after {endpoint.timeout_seconds:g} s")
    except OSError as problem:
        reason = ("connect", str(problem))
    finally:
        if transport is not None:
            transport.abort()
    await _read(answer, seen, sent)
    answer.latency = (seen[-1][0] if seen and reason is None else time.perf_counter()) - sent
    if reason is not None and answer.error in (None, *UNFINISHED):
        answer.fail(*reason)
    return answer


async def _read(answer: Answer, pieces: list[tuple[float, bytes]], sent: float) -> None:
    decoder = Decoder()
    try:
        for number, (when, payload) in enumerate(decode(pieces, decoder), 1):
            take(answer, when - sent, json.loads(payload))
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)
    except (ValueError, AttributeError, TypeError, KeyError, IndexError) as problem:
        answer.fail("bad-answer", f"{type(problem).__name__}: {problem}")
    if answer.error is not None:
        return
    if decoder.status is None:
        answer.fail("no-answer", "closed before an answer came")
    elif decoder.status != 200:
        answer.fail(f"http-{decoder.status}", decoder.body.decode(errors="replace"))
    elif not decoder.is_events:
        answer.fail("no-stream", decoder.body.decode(errors="replace"))
    elif not decoder.finished:
        answer.fail("cut-off", f"the stream ended after {len(answer.token_times)} pieces")
    elif not answer.token_times:
        answer.fail("no-tokens", "the stream held no text")


def take(answer: Answer, when: float, event: Any) -> None:
    """Put one event of a stream, which came `when` seconds after sending, into the answer."""
    if "error" in event:
        answer.fail("error-event", json.dumps(event["error"]))
        return
    if event.get("usage"):
        answer.usage = event["usage"]
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        piece = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if piece or delta.get("tool_calls"):
            answer.token_times.append(when)
            answer.text += piece or ""
        elif "role" not in delta and choice.get("finish_reason") is None:
            answer.empty_chunks += 1


def usage_count(usage: Mapping[str, Any] | None, *path: str) -> int | None:
    """A count from the server's usage; None where it does not say."""
    found: Any = usage
    for name in path:
        with contextlib.suppress(AttributeError):
            found = found.get(name)
            continue
        return None
    return found if isinstance(found, int) else None
