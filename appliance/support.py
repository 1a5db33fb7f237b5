"""A support bundle: what somebody needs who was not there, without secrets and identities.

Everything is made in memory and listed before anything is written. What is in it can be replayed:
`appliance preflight --host BUNDLE/machine`.
"""

from __future__ import annotations

import io
import json
import re
import socket
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance import durable
from appliance.errors import ServeError
from appliance.serve.log import tail
from appliance.serve.state import Files
from preflight.blank import Blanker

LOG_LINES = 5000
AUTHORIZATION = r"(?i)(authorization\W{1,4}(?:bearer\s+)?)[^\s\"',}]+"
PASSWORD = r"(\b[a-z][a-z+]+://)[^/\s:@]+:[^/\s@]+@"
# (what is kept of it, pattern). Order matters: the longest form first.
PATTERNS = (
    (r"\1[redacted]", re.compile(AUTHORIZATION)),
    ("[redacted]", re.compile(r"\bsk-[\w-]{16,}")),
    ("[redacted]", re.compile(r"\bhf_[A-Za-z0-9]{16,}")),
    (r"\1[redacted]@", re.compile(PASSWORD)),
    ("[mail]", re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.]+\b")),
    ("/home/[user]", re.compile(r"/home/(?!\[user\])[^/\s\"']+")),
)


@dataclass(frozen=True)
class Item:
    """One file of the bundle, as it will be written, and how much was taken out of it."""

    name: str
    text: str
    redacted: int = 0


class Redactor:
    """Takes out known secrets by value, likely ones by form, and what names machine or person."""

    def __init__(self, secrets: Iterable[str], hostname: str | None = None) -> None:
        self._secrets = sorted({s for s in secrets if len(s) >= 8}, key=len, reverse=True)
        self._blanker = Blanker(hostname)

    def __call__(self, name: str, text: str) -> Item:
        count = 0
        for secret in self._secrets:
            count += text.count(secret)
            text = text.replace(secret, "[redacted]")
        for kept, pattern in PATTERNS:
            text, found = pattern.subn(kept, text)
            count += found
        return Item(name, self._blanker.text(text), count)


def secrets_of(files: Files) -> set[str]:
    """Every key that this appliance knows."""
    found: set[str] = set()
    for path in (files.keys, files.control_key):
        if path.exists():
            lines = (line.strip() for line in path.read_text("utf-8", "replace").splitlines())
            found |= {line for line in lines if line and not line.startswith("#")}
    return found


def collect(
    files: Files, texts: dict[str, str], machine: Path | None, hostname: str | None = None
) -> list[Item]:
    """The bundle's files: `texts` (facts, findings, metrics, settings, by name), the recorded
    machine, and what the state directory holds. Keys are never read into it."""
    redact = Redactor(secrets_of(files), hostname or socket.gethostname())
    items = [redact(name, text) for name, text in texts.items()]
    if machine is not None:
        items += [
            # Recordings were blanked as they were made; blanked again, a replay could differ.
            Item(f"machine/{path.name}", path.read_text("utf-8", "replace"))
            for path in sorted(machine.iterdir())
        ]
    for name in ("state.json", "plan.json", "failure.json", "deployments.json"):
        path = files.folder / name
        if path.exists():
            items.append(redact(name, path.read_text("utf-8", "replace")))
    for path in (files.engine_log, files.engine_log.with_suffix(".previous.log"),
                 files.supervisor_log):  # fmt: skip
        if path.exists():
            items.append(redact(f"logs/{path.name}", "\n".join(tail(path, LOG_LINES)) + "\n"))
    return items


def write(items: list[Item], out: Path) -> int:
    """The bundle as a .tar.gz readable only by its owner; its size in bytes."""
    buffer = io.BytesIO()
    root = out.name.removesuffix(".tar.gz")
    listing = [
        {"name": i.name, "bytes": len(i.text.encode()), "redacted": i.redacted} for i in items
    ]
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for item in [Item("contents.json", json.dumps(listing, indent=1) + "\n"), *items]:
            raw = item.text.encode()
            member = tarfile.TarInfo(f"{root}/{item.name}")
            member.size, member.mode = len(raw), 0o600
            archive.addfile(member, io.BytesIO(raw))
    try:
        durable.write_file(out, buffer.getvalue(), mode=durable.OWNER_ONLY)
    except OSError as error:
        raise ServeError(f"cannot write {out}: {error.strerror}") from error
    return len(buffer.getvalue())
