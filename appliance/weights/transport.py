"""HTTP over the standard library: kept-open connections, proxies, our own redirects.

http.client rather than a client library: it reads into memory without a state machine in Python
(the transfer rate), adds no dependency, and leaves redirects to us, so that what may follow one
to another host is decided here, in four lines.
"""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from appliance.errors import SourceError, UsageError
from appliance.weights.network import Network
from appliance.weights.source import Again

MAX_REDIRECTS = 6
MAX_RETRY_AFTER_SECONDS = 600.0
PIECE_BYTES = 1 << 20
# Fewer bytes than this in `stall_seconds` count as nothing: a server that dribbles is a stall too.
STALL_BYTES = 64 << 10
Origin = tuple[str, str, int]
Authorize = Callable[[str, SplitResult, Mapping[str, str]], Mapping[str, str]]


@dataclass
class Answer:
    """One response whose body has not been read; `url` is where the last redirect led."""

    url: str
    status: int
    headers: http.client.HTTPMessage
    raw: http.client.HTTPResponse
    token_sent: bool

    def read(self, max_bytes: int, *, some: bool = False) -> bytes:
        """The next bytes of the body; with `some`, those that are there. Raises Again."""
        try:
            return self.raw.read1(max_bytes) if some else self.raw.read(max_bytes)
        except (OSError, http.client.HTTPException) as error:
            raise Again(f"{shown(self.url)}: the body broke off: {_reason(error)}") from error


class Client:
    """The connections of one thread. `authorize` gives headers for requests to `home` alone."""

    def __init__(self, network: Network, home: str, authorize: Authorize) -> None:
        self.network = network
        self._home = origin(urlsplit(home))
        self._authorize = authorize
        self._open: dict[Origin, http.client.HTTPConnection] = {}

    @contextmanager
    def get(self, url: str, headers: Mapping[str, str]) -> Iterator[Answer]:
        """GET, redirects followed. A body that was not read to its end closes its connection."""
        answer = self._follow(url, headers)
        try:
            yield answer
        finally:
            if not answer.raw.isclosed() or answer.raw.will_close:
                answer.raw.close()
                self._drop(answer.url)

    def close(self) -> None:
        """End every connection; a request after this opens a new one."""
        for connection in list(self._open.values()):
            connection.close()
        self._open.clear()

    def _follow(self, url: str, headers: Mapping[str, str]) -> Answer:
        for _ in range(MAX_REDIRECTS + 1):
            raw = self._send(url, headers)
            if raw.status not in (301, 302, 303, 307, 308):
                return Answer(url, raw.status, raw.headers, raw, self._is_authorized(url))
            target = urljoin(url, raw.headers.get("Location") or "")
            raw.close()
            self._drop(url)
            if url.startswith("https:") and not target.startswith("https:"):
                raise SourceError(f"{shown(url)} redirects to {shown(target)}, out of TLS: refused")
            url = target
        raise SourceError(f"{shown(url)}: more than {MAX_REDIRECTS} redirects")

    def _send(self, url: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        sent = {"Accept-Encoding": "identity", "User-Agent": "moe-appliance", **headers}
        if origin(parts) == self._home:
            sent.update(self._authorize("GET", parts, sent))
        reused = origin(parts) in self._open
        try:
            return self._once(parts, sent)
        except (OSError, http.client.HTTPException) as error:
            self._drop(url)
            if isinstance(error, ssl.SSLCertVerificationError):
                raise SourceError(
                    f"{shown(url)}: the certificate is not trusted: {error.verify_message}",
                    fix="name the CA's file in SSL_CERT_FILE",
                ) from error
            if reused and isinstance(error, ConnectionError | http.client.RemoteDisconnected):
                # The server closed a kept-open connection: no fault, and nothing was answered.
                return self._retry_fresh(url, parts, sent)
            raise Again(f"{shown(url)}: {_reason(error)}") from error

    def _is_authorized(self, url: str) -> bool:
        parts = urlsplit(url)
        return origin(parts) == self._home and bool(self._authorize("GET", parts, {}))

    def _retry_fresh(
        self, url: str, parts: SplitResult, sent: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        try:
            return self._once(parts, sent)
        except (OSError, http.client.HTTPException) as error:
            self._drop(url)
            raise Again(f"{shown(url)}: {_reason(error)}") from error

    def _once(self, parts: SplitResult, sent: Mapping[str, str]) -> http.client.HTTPResponse:
        connection, by_proxy = self._connection(parts)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if by_proxy:
            path = f"{parts.scheme}://{parts.netloc}{path}"
            sent = {**sent, **_proxy_headers(self.network.http_proxy or "")}
        connection.request("GET", path, headers=dict(sent))
        return connection.getresponse()

    def _connection(self, parts: SplitResult) -> tuple[http.client.HTTPConnection, bool]:
        """A connection to the host, and whether requests on it are to a proxy in plain HTTP."""
        scheme, host, _ = key = origin(parts)
        proxy = self.network.proxy_for(scheme, host)
        if key not in self._open:
            self._open[key] = self._connect(key, proxy)
        return self._open[key], proxy is not None and scheme == "http"

    def _connect(self, key: Origin, proxy: str | None) -> http.client.HTTPConnection:
        scheme, host, port = key
        through = urlsplit(proxy) if proxy else None
        at = (through.hostname or "", through.port or 8080) if through else (host, port)
        seconds = self.network.stall_seconds
        if scheme == "http":
            return http.client.HTTPConnection(*at, timeout=seconds)
        context = ssl.create_default_context(cafile=self.network.ca_file)
        connection = http.client.HTTPSConnection(*at, timeout=seconds, context=context)
        if proxy:
            connection.set_tunnel(host, port, _proxy_headers(proxy))
        return connection

    def _drop(self, url: str) -> None:
        connection = self._open.pop(origin(urlsplit(url)), None)
        if connection is not None:
            connection.close()


def pieces(answer: Answer, size_bytes: int, stall_seconds: float) -> Iterator[bytes]:
    """Exactly so many bytes of the body, or Again where it ends before or stalls."""
    left, since, moved = size_bytes, time.monotonic(), 0
    while left:
        data = answer.read(min(PIECE_BYTES, left), some=True)
        if not data:
            raise Again(f"{shown(answer.url)}: the body ended {left:,} bytes early")
        left -= len(data)
        moved += len(data)
        now = time.monotonic()
        if moved >= STALL_BYTES:
            since, moved = now, 0
        elif now - since > stall_seconds:
            raise Again(f"{shown(answer.url)}: {moved} bytes in {stall_seconds:g} s: stalled")
        yield data
    # What http.client knows to be the end makes the connection free for the next request.
    if not answer.raw.isclosed() and answer.raw.length == 0:
        answer.read(1)


def origin(parts: SplitResult) -> Origin:
    """Scheme, host and port: what a credential belongs to."""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SourceError(f"{shown(parts.geturl())} is no HTTP address")
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def shown(url: str) -> str:
    """An address without what may be secret: user, password, query and fragment."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def check_address(url: str) -> None:
    """Refuse credentials in an address: `ps` and shell histories would show them."""
    if urlsplit(url).username is not None:
        raise UsageError(
            f"{shown(url)} came with a user or password in it, which `ps` shows to everybody",
            fix="put the token in a file and name it in APPLIANCE_WEIGHTS_TOKEN_FILE",
        )


def bearer(token: str | None) -> Authorize:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return lambda method, parts, sent: headers


def retry_after(headers: http.client.HTTPMessage) -> float | None:
    """Seconds that the server asks to wait, at most MAX_RETRY_AFTER_SECONDS."""
    text = (headers.get("Retry-After") or "").strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER_SECONDS)
    try:
        seconds = parsedate_to_datetime(text).timestamp() - time.time()
    except ValueError:
        return None
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS)


def _proxy_headers(proxy: str) -> dict[str, str]:
    parts = urlsplit(proxy)
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def _reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
