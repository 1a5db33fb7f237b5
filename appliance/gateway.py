"""ASGI middleware in front of every route of the engine's server: no key, no answer.

vLLM loads it with `--middleware appliance.gateway.Gateway`. Denied unless allowed: GET and HEAD
/health are open; CONTROL_PREFIXES need the control key; all else needs an API key and
waits until the engine has proved itself (POST /gateway/admit). Keys come from files named by the
environment, never from arguments; the files are read again when they change.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from appliance.errors import UsageError
from appliance.serve.keys import KeyFile
from appliance.settings import Settings, read_settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# The last two are vLLM's own: they change how many engines there are, for everybody.
CONTROL_PREFIXES = ("/appliance/", "/gateway/", "/scale_elastic_ep", "/is_scaling_elastic_ep")
RETRY_SECONDS = 5


class Gateway:
    """Wraps an ASGI app. State: `admitted`, `draining`, and the requests in flight."""

    def __init__(self, app: App, settings: Settings | None = None) -> None:
        settings = settings or read_settings()
        if settings.gateway_keys is None or settings.gateway_control_key is None:
            raise UsageError(
                "the gateway was given no key files",
                fix="set APPLIANCE_GATEWAY_KEYS and APPLIANCE_GATEWAY_CONTROL_KEY to their paths",
            )
        self._app = app
        self._keys = KeyFile(settings.gateway_keys)
        self._control_key = KeyFile(settings.gateway_control_key)
        self._max_body_bytes = settings.gateway_max_body_bytes
        self._max_header_bytes = settings.gateway_max_header_bytes
        self._admitted = False
        self._draining = False
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > self._max_header_bytes:
            limit = f"request headers are longer than {self._max_header_bytes} bytes"
            await _refuse(send, 431, limit, "request_header_fields_too_large")
        elif path == "/health" and scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
        elif refusal := self._refusal(path, headers):
            await _refuse(send, *refusal)
        elif path.startswith("/gateway/"):
            await self._control(scope["method"], path, send)
        else:
            await self._forward(scope, receive, send, counted=not _is_control(path))

    def _refusal(
        self, path: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> tuple[int, str, str] | None:
        """None: let it in. Else status, sentence, code."""
        candidates = _candidates(headers)
        control = self._control_key.accepts(candidates)
        if not control and not self._keys.accepts(candidates):
            return 401, "a valid API key is required: Authorization: Bearer KEY", "invalid_api_key"
        if control:
            return None
        if _is_control(path):
            return 403, "this route needs the control key", "control_key_required"
        if self._draining:
            return 503, "the server is shutting down", "draining"
        if not self._admitted:
            return 503, "the engine has not proved itself yet", "not_ready"
        return None

    async def _control(self, method: str, path: str, send: Send) -> None:
        if (method, path) == ("POST", "/gateway/admit"):
            self._admitted, self._draining = True, False
        elif (method, path) == ("POST", "/gateway/drain"):
            self._draining = True
        elif (method, path) != ("GET", "/gateway/state"):
            await _refuse(send, 404, f"no such route: {method} {path}", "not_found")
            return
        state = {
            "admitted": self._admitted,
            "draining": self._draining,
            "in_flight": self._in_flight,
        }
        await _answer(send, 200, state)

    async def _forward(self, scope: Scope, receive: Receive, send: Send, *, counted: bool) -> None:
        """Pass on, no more than the body limit; in flight until the app is done with it."""
        body = _LimitedBody(receive, send, self._max_body_bytes)
        if body.declared_too_long(scope["headers"]):
            await body.refuse()
            return
        self._in_flight += counted
        try:
            await self._app(scope, body.receive, body.send)
        except Exception:
            # An app whose body was cut short may say so in any way; 413 has been answered.
            if not body.refused:
                raise
        finally:
            self._in_flight -= counted

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal := self._refusal(scope["path"], scope["headers"]):
            # 1008 policy violation, 1013 try again later (RFC 6455 and its registry).
            code = 1013 if refusal[0] == 503 else 1008
            await receive()
            await send({"type": "websocket.close", "code": code, "reason": refusal[1]})
            return
        self._in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= 1


class _LimitedBody:
    """Counts a request's body as it arrives; past the limit the answer becomes 413."""

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._read = 0
        self._started = False
        self.refused = False

    def declared_too_long(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        for name, value in headers:
            # Frameworks answer a malformed length themselves.
            if name.lower() == b"content-length" and value.isdigit():
                return int(value) > self._limit
        return False

    async def receive(self) -> Message:
        if self.refused:
            return {"type": "http.disconnect"}
        message = await self._receive()
        self._read += len(message.get("body", b""))
        if self._read > self._limit and not self._started:
            await self.refuse()
            return {"type": "http.disconnect"}
        return message

    async def send(self, message: Message) -> None:
        if self.refused:
            return  # what the app makes of a body cut short is not the answer
        self._started = True
        await self._send(message)

    async def refuse(self) -> None:
        self.refused = True
        sentence = f"the request body is longer than {self._limit} bytes"
        await _refuse(self._send, 413, sentence, "request_too_large")


def _is_control(path: str) -> bool:
    return path.startswith(CONTROL_PREFIXES)


def _candidates(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    found = []
    for name, value in headers:
        if name.lower() == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip())
        elif name.lower() == b"x-api-key":
            found.append(value.strip())
    return found


async def _refuse(send: Send, status: int, sentence: str, code: str) -> None:
    kind = {401: "authentication_error", 403: "permission_error", 503: "service_unavailable"}
    error = {
        "message": sentence,
        "type": kind.get(status, "invalid_request_error"),
        "param": None,
        "code": code,
    }
    extra = {
        401: [(b"www-authenticate", b"Bearer")],
        503: [(b"retry-after", str(RETRY_SECONDS).encode())],
    }
    await _answer(send, status, {"error": error}, extra.get(status, []))


async def _answer(
    send: Send, status: int, value: object, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    body = json.dumps(value).encode()
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})
