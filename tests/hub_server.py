"""A minimal hub over a folder, fast (sendfile) and counting: enough for huggingface_hub and us.

python tests/hub_server.py FOLDER    prints its port; GET /sent answers with bytes sent so far
"""

import hashlib
import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
STEP_BYTES = 1 << 20


class Hub(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.sent = 0
        self.lock = threading.Lock()
        self.siblings = [
            entry(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()
        ]
        self.hashes = {
            e["rfilename"]: e.get("lfs", {}).get("sha256", e["blobId"]) for e in self.siblings
        }

    def handle_error(self, request: object, client_address: object) -> None:
        """Readers that are killed are part of the test."""


def entry(folder: Path, path: Path) -> dict:
    size = path.stat().st_size
    found = {"rfilename": path.relative_to(folder).as_posix(), "size": size, "blobId": ""}
    if path.suffix == ".safetensors":
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {**found, "lfs": {"sha256": digest, "size": size, "pointerSize": 130}}
    body = path.read_bytes()
    return {**found, "blobId": hashlib.sha1(b"blob %d\0" % size + body).hexdigest()}


def leaf(found: dict) -> dict:
    """The same file as /tree lists it."""
    lfs = found.get("lfs")
    listed = {"type": "file", "path": found["rfilename"], "size": found["size"], "oid": "0" * 40}
    return listed if lfs is None else {**listed, "lfs": {**lfs, "oid": lfs["sha256"]}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/sent":
            return self.small(json.dumps(self.server.sent).encode())
        if path.startswith("/api/models/org/tiny/tree/"):
            return self.small(json.dumps([leaf(found) for found in self.server.siblings]).encode())
        if path.startswith("/api/models/org/tiny"):
            found = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "private": False}
            return self.small(json.dumps({**found, "siblings": self.server.siblings}).encode())
        match = re.fullmatch(r"/org/tiny/resolve/[^/]+/(.+)", path)
        if match is None or match[1] not in self.server.hashes:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        return self.file(self.server.folder / match[1], self.server.hashes[match[1]], with_body)

    def small(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def file(self, path: Path, tag: str, with_body: bool) -> None:
        size = path.stat().st_size
        start, stop = 0, size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            start, stop = int(asked[1]), int(asked[2]) + 1 if asked[2] else size
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        self.wfile.flush()
        if not with_body:
            return
        with path.open("rb") as stream:
            while start < stop:
                sent = os.sendfile(
                    self.connection.fileno(), stream.fileno(), start, min(STEP_BYTES, stop - start)
                )
                start += sent
                with self.server.lock:
                    self.server.sent += sent

    def log_message(self, *args: object) -> None:
        pass


if __name__ == "__main__":
    with Hub(Path(sys.argv[1])) as hub:
        print(hub.server_address[1], flush=True)
        hub.serve_forever()
