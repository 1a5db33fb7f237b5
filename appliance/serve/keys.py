"""The key files: API keys that live as long as the operator wants, a control key for each start."""

from __future__ import annotations

import secrets
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
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"cannot read the key file {path}: {error}") from error
    for line in lines:
        key = line.strip()
        if key and not key.startswith("#"):
            return key
    raise ServeError(
        f"the key file {path} holds no key", fix="write one key a line, or remove the file"
    )
