"""The engine's HTTP server as the supervisor sees it. Standard library only; never a proxy."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.errors import ServeError
from appliance.serve.trust import trusting

EVENT_SECONDS = 600.0  # from one piece of a stream to the next
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


@dataclass(frozen=True)
class Client:
    """One server and one key. Every method raises ServeError with the path and the reason."""

    host: str
    port: int
    key: str
    certificate: Path | None = None  # of the server, where it speaks TLS: no other is taken
    timeout_seconds: float = 10.0
    dated: bool = False  # refuse a certificate that has expired, as its users do

    def is_healthy(self) -> bool:
        """GET /health says 200. It says so while the engine hangs, too: this is not proof."""
        try:
            self._text("GET", "/health", None, 5.0)
        except ServeError:
            return False
        return True

    def get(self, path: str, *, timeout_seconds: float | None = None) -> Any:
        return self._json("GET", path, None, timeout_seconds or self.timeout_seconds)

    def text(self, path: str) -> str:
        return self._text("GET", path, None, self.timeout_seconds)

    def post(self, path: str, body: object = None, *, timeout_seconds: float | None = None) -> Any:
        return self._json("POST", path, body, timeout_seconds or self.timeout_seconds)

    def metric(self, name: str) -> float | None:
        """The sum over all label sets of a sample of /metrics; None where it is not there."""
        found = None
        for line in self._text("GET", "/metrics", None, self.timeout_seconds).splitlines():
            if line.startswith((name + "{", name + " ")):
                found = (found or 0.0) + float(line.rpartition(" ")[2])
        return found

    def events(self, path: str, body: object) -> Iterator[Any]:
        """POST and yield each server-sent event's JSON as it arrives, up to [DONE]."""
        with self._answer("POST", path, body, timeout_seconds=EVENT_SECONDS) as answer:
            for line in _lines(answer, path):
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
        raise ServeError(f"the stream of {path} ended early")

    def _json(self, method: str, path: str, body: object, timeout_seconds: float) -> Any:
        text = self._text(method, path, body, timeout_seconds)
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ServeError(f"{method} {path} answered something else than JSON") from error

    def _text(self, method: str, path: str, body: object, timeout_seconds: float) -> str:
        with self._answer(method, path, body, timeout_seconds=timeout_seconds) as answer:
            try:
                return answer.read().decode("utf-8")
            except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
                raise ServeError(f"{method} {path} was cut off: {error}") from error

    @contextmanager
    def _answer(
        self, method: str, path: str, body: object, *, timeout_seconds: float
    ) -> Iterator[http.client.HTTPResponse]:
        address = ANY_ADDRESS.get(self.host, self.host)
        connection = self._connection(address, timeout_seconds)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        payload = None if body is None else json.dumps(body)
        try:
            try:
                connection.request(method, path, body=payload, headers=headers)
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                raise ServeError(f"{method} {path} got no answer: {error or 'closed'}") from error
            if answer.status >= 300:
                reason = _reason(answer.read(4096))
                raise ServeError(f"{method} {path} answered {answer.status}: {reason}")
            yield answer
        finally:
            connection.close()

    def _connection(self, address: str, seconds: float) -> http.client.HTTPConnection:
        if self.certificate is None:
            return http.client.HTTPConnection(address, self.port, timeout=seconds)
        context = trusting(self.certificate, dated=self.dated)
        return http.client.HTTPSConnection(address, self.port, timeout=seconds, context=context)


def _lines(answer: http.client.HTTPResponse, path: str) -> Iterator[str]:
    while True:
        try:
            raw = answer.readline()
        except (OSError, http.client.HTTPException) as error:
            raise ServeError(f"the stream of {path} was cut off: {error}") from error
        if not raw:
            return
        yield raw.decode("utf-8").strip()


def _reason(body: bytes) -> str:
    """The message of an OpenAI-style error, else the first line of whatever it is."""
    text = body.decode("utf-8", errors="replace").strip()
    try:
        message = json.loads(text)["error"]["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return (text.splitlines() or ["no reason given"])[0][:300]
    return str(message)


@dataclass(frozen=True)
class Health:
    """What the agent says of an appliance."""

    ready: bool
    body: dict[str, Any]


def ask_agent(host: str, port: int) -> Health:
    """GET /readyz of the agent. Raises ServeError where nobody answers."""
    address = ANY_ADDRESS.get(host, host)
    connection = http.client.HTTPConnection(address, port, timeout=4.0)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body = json.loads(answer.read(65536))
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise ServeError(
            f"nothing answers on the health port {address}:{port}: {error or 'closed'}",
            fix="start one with `appliance up`, or set APPLIANCE_AGENT_PORT",
        ) from error
    finally:
        connection.close()
    return Health(answer.status == 200, body)
