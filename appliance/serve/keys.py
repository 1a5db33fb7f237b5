"""The key files: API keys that live as long as the operator wants, a control key for each start."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

from appliance.errors import ServeError
from appliance.serve.state import Files, write_aside


def make_keys(files: Files) -> bool:
    """Make the API key on the first start, the control key on every one.

    True where an API key was made. Raises ServeError where the file of keys holds none.
    """
    write_aside(files.control_key, secrets.token_urlsafe(32) + "\n")
    if files.keys.exists():
        first_key(files.keys)
        return False
    write_aside(files.keys, "sk-" + secrets.token_urlsafe(32) + "\n")
    return True


def first_key(path: Path) -> str:
    """The first key of a key file. Raises ServeError where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise ServeError(f"there is no key file {path}", fix="appliance up makes it") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ServeError(
            f"cannot read the key file {path}: {reason}",
            fix="it is a text file, one key a line, that whoever serves may read",
        ) from error
    for line in lines:
        key = line.strip()
        if key and not key.startswith("#"):
            return key
    raise ServeError(
        f"the key file {path} holds no key", fix="write one key a line, or remove the file"
    )


class KeyFile:
    """The keys of a file, one a line; `#` starts a comment. Unreadable or empty: nobody enters."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._digests: tuple[bytes, ...] = ()

    def accepts(self, candidates: Iterable[bytes]) -> bool:
        """Compares digests of equal length, all of them, so time tells nothing about a key."""
        self._reload()
        accepted = False
        for candidate in candidates:
            digest = hashlib.sha256(candidate).digest()
            for known in self._digests:
                accepted |= hmac.compare_digest(digest, known)
        return accepted

    def _reload(self) -> None:
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._seen:
                return
            lines = self._path.read_bytes().splitlines()
        except OSError:
            self._seen, self._digests = None, ()
            return
        keys = (line.strip() for line in lines)
        self._digests = tuple(
            hashlib.sha256(key).digest() for key in keys if key and not key.startswith(b"#")
        )
        self._seen = seen
