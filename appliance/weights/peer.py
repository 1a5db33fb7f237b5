"""`weights serve`: this store as a mirror for the next box. Read-only, ranges, sendfile."""

from __future__ import annotations

import hmac
import json
import os
import re
import sys
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import FileIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

from appliance.errors import ApplianceError
from appliance.weights.manifest import Manifest
from appliance.weights.names import MANIFEST
from appliance.weights.store import Store

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_PATH = re.compile(r"/(?:releases/([^/]+)|(current))/(.+)")


class PeerServer(ThreadingHTTPServer):
    """Serves /releases, /releases/ID/FILE and /current/FILE; with a token only to who has it."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, store: Store, address: tuple[str, int], token: str | None = None) -> None:
        super().__init__(address, _Handler)
        self.store = store
        self.token = token
        self.manifest = lru_cache(maxsize=16)(store.manifest)

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that went away is no fault of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def file(self, path: str) -> tuple[Path, str] | None:
        """The file behind a request's path and its ETag; None for whatever is no file of ours."""
        found = _PATH.fullmatch(unquote(urlsplit(path).path))
        if found is None:
            return None
        release = self.store.current() if found[2] else found[1]
        if release is None or release not in self.store.releases():
            return None
        manifest: Manifest = self.manifest(release)
        if found[3] == MANIFEST:
            return self.store.release_folder(release) / MANIFEST, f'"{release}"'
        for file in manifest.files:
            if file.path == found[3]:
                return self.store.blob(file.sha256), f'"{file.sha256}"'
        return None


class _Handler(BaseHTTPRequestHandler):
    server: PeerServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        token = self.server.token
        if token is not None:
            sent = (self.headers.get("Authorization") or "").encode()
            if not hmac.compare_digest(sent, f"Bearer {token}".encode()):
                return self._small(HTTPStatus.UNAUTHORIZED, b"")
        try:
            if urlsplit(self.path).path == "/releases":
                names = json.dumps(self.server.store.releases()).encode()
                return self._small(HTTPStatus.OK, names)
            found = self.server.file(self.path)
            if found is None:
                return self._small(HTTPStatus.NOT_FOUND, b"")
            descriptor = os.open(found[0], os.O_RDONLY | os.O_NOFOLLOW)
            stream = os.fdopen(descriptor, "rb", buffering=0)
        except (OSError, ApplianceError):
            return self._small(HTTPStatus.INTERNAL_SERVER_ERROR, b"")
        with stream:
            self._file(stream, found[1], with_body)
        return None

    def _file(self, stream: FileIO, tag: str, with_body: bool) -> None:
        size = os.fstat(stream.fileno()).st_size
        start, stop, status = 0, size, HTTPStatus.OK
        wanted = _RANGE.fullmatch(self.headers.get("Range") or "")
        if wanted is not None:
            start = int(wanted[1])
            stop = min(size, int(wanted[2]) + 1) if wanted[2] else size
            status = HTTPStatus.PARTIAL_CONTENT
            if start >= stop:
                self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        self.send_response(status)
        self.send_header("ETag", tag)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        if status == HTTPStatus.PARTIAL_CONTENT:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        self.wfile.flush()
        # The socket's own sendfile: one with a timeout does not wait by itself.
        if with_body and self.connection.sendfile(stream, start, stop - start) < stop - start:
            self.close_connection = True  # the file became shorter: the reader must notice

    def _small(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: paths and addresses of peers are nobody's business here."""
