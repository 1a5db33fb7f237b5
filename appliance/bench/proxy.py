"""Between a person's tools and the server: every byte passes as it came, a Recorder is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from appliance.bench.client import Answer, take
from appliance.bench.events import Decoder, decode
from appliance.bench.recorder import Recorder
from appliance.errors import UsageError

MOST_BODY_BYTES = 64 << 20
PATIENCE_SECONDS = 600.0


class _LengthRequired(Exception):
    """A request in chunks: its end is not known before it was all read."""


class _Unreachable(Exception):
    """The server does not take a connection."""


@dataclass
class Proxy:
    """Serves on `port` of this machine and asks `upstream` (an address up to, without, /v1)."""

    upstream: str
    recorder: Recorder
    told: Callable[[str], None] = lambda text: None

    async def serve(self, port: int, ready: Callable[[int], None]) -> None:
        """Until cancelled. `ready` is given the port, which 0 lets the system choose."""
        url = urlsplit(self.upstream)
        if url.scheme not in ("http", "https") or url.hostname is None:
            raise UsageError(f"{self.upstream!r} is no address", fix="--to http://127.0.0.1:8000")
        server = await asyncio.start_server(self._one, "127.0.0.1", port)
        ready(server.sockets[0].getsockname()[1])
        async with server:
            await server.serve_forever()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await _body(head, reader)
            began, sent = time.time(), time.perf_counter()
            pieces, error = await self._pass_on(head + body, writer)
            if b"/chat/completions " in head.partition(b"\r\n")[0]:
                self.recorder.keep(body, began, _answer(pieces, sent, error))
        except (
            ConnectionError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            ValueError,
        ):
            pass  # the client has gone, or sent no request
        except asyncio.CancelledError:
            pass  # recording ends: what is under way is not kept
        except _LengthRequired:
            writer.write(b"HTTP/1.1 411 Length Required\r\nContent-Length: 0\r\n\r\n")
        except _Unreachable as problem:
            self.told(f"{self.upstream}: {problem}")
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
        finally:
            writer.close()

    async def _pass_on(
        self, request: bytes, writer: asyncio.StreamWriter
    ) -> tuple[list[tuple[float, bytes]], str | None]:
        url = urlsplit(self.upstream)
        secure = url.scheme == "https"
        port = url.port or (443 if secure else 80)
        try:
            back, forth = await asyncio.open_connection(url.hostname, port, ssl=secure or None)
        except OSError as problem:
            raise _Unreachable(str(problem)) from problem
        pieces: list[tuple[float, bytes]] = []
        try:
            forth.write(_towards(request, url.netloc))
            while piece := await asyncio.wait_for(back.read(65536), PATIENCE_SECONDS):
                pieces.append((time.perf_counter(), piece))
                try:
                    writer.write(piece)
                    await writer.drain()
                except ConnectionError:
                    return pieces, "client-left"
        except TimeoutError:
            return pieces, "timeout"
        except ConnectionError:
            return pieces, "reset"
        finally:
            forth.close()
        return pieces, None


def _towards(request: bytes, netloc: str) -> bytes:
    """The same request with the server's name, and one request a connection."""
    head, _, body = request.partition(b"\r\n\r\n")
    first, *headers = head.split(b"\r\n")
    ours = (b"host:", b"connection:", b"accept-encoding:")  # a packed answer has no pieces
    kept = [line for line in headers if not line.lower().startswith(ours)]
    lines = [first, f"Host: {netloc}".encode(), b"Connection: close", *kept]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            size = int(line.partition(b":")[2])
            if size > MOST_BODY_BYTES:
                raise ValueError(f"a body of {size} bytes")
            return await reader.readexactly(size)
        if line.startswith(b"transfer-encoding:"):
            raise _LengthRequired
    return b""


def _answer(pieces: list[tuple[float, bytes]], sent: float, error: str | None) -> Answer:
    answer, decoder = Answer(), Decoder()
    answer.latency = (pieces[-1][0] if pieces else time.perf_counter()) - sent
    try:
        for when, payload in decode(pieces, decoder):
            take(answer, when - sent, json.loads(payload))
        if decoder.status == 200 and not decoder.is_events:
            answer.usage = json.loads(decoder.body).get("usage")
    except (ValueError, AttributeError, TypeError, KeyError, IndexError) as problem:
        answer.fail("bad-answer", str(problem))
    if decoder.status is None:
        answer.fail("no-answer", "closed before an answer came")
    elif decoder.status != 200:
        answer.fail(f"http-{decoder.status}", decoder.body.decode(errors="replace"))
    elif decoder.is_events and not decoder.finished and answer.error is None:
        answer.fail("cut-off", f"the stream ended after {len(answer.token_times)} pieces")
    if error is not None:
        answer.fail(error, "")
    return answer
