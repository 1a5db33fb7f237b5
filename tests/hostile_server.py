"""A server of files that can do everything wrong, by a programme of faults."""

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Request:
    path: str
    start: int | None
    stop: int | None
    headers: dict[str, str]


Fault = Callable[["Handler", "Request", bytes], None]


@dataclass
class Programme:
    """`fault` happens to the first `times` requests for which `when` is true."""

    fault: Fault
    when: Callable[[Request], bool]
    times: int


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "HostileServer"

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        start = stop = None
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), int(last) + 1
        request = Request(unquote(self.path), start, stop, dict(self.headers))
        server = self.server
        with server.lock:
            server.requests.append(request)
            chosen = next((p for p in server.faults if p.times > 0 and p.when(request)), None)
            if chosen is not None:
                chosen.times -= 1
        body = server.files.get(unquote(urlsplit(self.path).path))
        if chosen is not None:
            chosen.fault(self, request, body or b"")
        elif body is None:
            self.answer(404, b"")
        else:
            self.good(request, body)

    def good(self, request: Request, body: bytes, **changes: str) -> None:
        headers = {"ETag": f'"{self.server.etag}"', **changes}
        if request.start is None:
            return self.answer(200, body, headers)
        piece = body[request.start : request.stop]
        if not piece:
            return self.answer(416, b"", {"Content-Range": f"bytes */{len(body)}"})
        end = request.start + len(piece) - 1
        headers.setdefault("Content-Range", f"bytes {request.start}-{end}/{len(body)}")
        return self.answer(206, piece, headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value.replace("_", "-"))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class HostileServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: list[Programme] = []
        self.requests: list[Request] = []
        self.etag = "one"
        self.lock = threading.Lock()
        self.over = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_address[1]}"

    def fails(
        self,
        fault: Fault,
        *,
        times: int = 1,
        when: Callable[[Request], bool] = lambda request: request.path.endswith(".safetensors"),
    ) -> None:
        self.faults.append(Programme(fault, when, times))

    def handle_error(self, request: object, client_address: object) -> None:
        """Readers that give up are part of the game."""

    def close(self) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()


def piece_of(request: Request, body: bytes) -> bytes:
    return body if request.start is None else body[request.start : request.stop]


def right_headers(handler: Handler, request: Request, body: bytes) -> None:
    piece = piece_of(request, body)
    handler.send_response(206)
    handler.send_header("ETag", f'"{handler.server.etag}"')
    handler.send_header("Content-Length", str(len(piece)))
    handler.send_header(
        "Content-Range", f"bytes {request.start}-{request.start + len(piece) - 1}/{len(body)}"
    )
    handler.end_headers()


def truncation(handler: Handler, request: Request, body: bytes) -> None:
    right_headers(handler, request, body)
    piece = piece_of(request, body)
    handler.wfile.write(piece[: len(piece) // 2])
    handler.close_connection = True


def reset(handler: Handler, request: Request, body: bytes) -> None:
    right_headers(handler, request, body)
    piece = piece_of(request, body)
    handler.wfile.write(piece[: len(piece) // 3])
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


def stall(handler: Handler, request: Request, body: bytes) -> None:
    right_headers(handler, request, body)
    handler.wfile.write(piece_of(request, body)[:1000])
    handler.wfile.flush()
    handler.server.over.wait(30)


def dribble(handler: Handler, request: Request, body: bytes) -> None:
    right_headers(handler, request, body)
    for at in range(1000):
        handler.wfile.write(piece_of(request, body)[at : at + 1])
        handler.wfile.flush()
        if handler.server.over.wait(0.05):
            return


def wrong_range(handler: Handler, request: Request, body: bytes) -> None:
    start = request.start + 16
    handler.good(
        request, body, **{"Content-Range": f"bytes {start}-{request.stop + 15}/{len(body)}"}
    )


def wrong_length(handler: Handler, request: Request, body: bytes) -> None:
    piece = piece_of(request, body)[:-7]
    end = request.stop - 1
    headers = {"Content-Range": f"bytes {request.start}-{end}/{len(body)}", "ETag": '"one"'}
    handler.answer(206, piece, headers)


def whole_file(handler: Handler, request: Request, body: bytes) -> None:
    handler.answer(200, body, {"ETag": '"one"'})


def not_satisfiable(handler: Handler, request: Request, body: bytes) -> None:
    handler.answer(416, b"", {"Content-Range": f"bytes */{len(body) // 2}"})


def too_many(handler: Handler, request: Request, body: bytes) -> None:
    handler.answer(429, b"slow down", {"Retry-After": "1"})


def unavailable(handler: Handler, request: Request, body: bytes) -> None:
    handler.answer(503, b"")


def changed(handler: Handler, request: Request, body: bytes) -> None:
    handler.good(request, body, ETag='"two"')


def gzip(handler: Handler, request: Request, body: bytes) -> None:
    handler.good(request, body, **{"Content-Encoding": "gzip"})


def wrong_bytes(handler: Handler, request: Request, body: bytes) -> None:
    piece = bytearray(piece_of(request, body))
    piece[len(piece) // 2] ^= 1
    right_headers(handler, request, body)
    handler.wfile.write(bytes(piece))


def slowly(seconds: float) -> Fault:
    def fault(handler: Handler, request: Request, body: bytes) -> None:
        time.sleep(seconds)
        handler.good(request, body)

    return fault


def redirect_to(url: str) -> Fault:
    def fault(handler: Handler, request: Request, body: bytes) -> None:
        handler.answer(302, b"", {"Location": url + handler.path})

    return fault
