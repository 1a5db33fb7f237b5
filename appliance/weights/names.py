"""Which file names a manifest may hold: what a hostile or careless source sends ends here."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from appliance.errors import WeightsError

MANIFEST = "appliance-manifest.json"  # ours, beside the files in every release
MAX_PART_BYTES = 255  # NAME_MAX of every file system in use
MAX_PATH_BYTES = 1024
SHA256 = re.compile(r"[0-9a-f]{64}")
_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def check_path(path: str) -> None:
    """Raises WeightsError unless `path` is a plain relative path that stays in its folder."""
    problem = _problem(path)
    if problem:
        raise WeightsError(
            f"the source names a file {path[:200]!a}, which {problem}: refused",
            fix="do not trust this source",
        )


def check_paths(paths: Iterable[str]) -> None:
    """Every path by itself, and no two that one file system would take for the same."""
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for path in paths:
        check_path(path)
        key = _folded(path)
        if key in seen:
            raise WeightsError(
                f"the source names both {seen[key]!a} and {path!a}: the same name on a file "
                "system that ignores case or Unicode form; refused"
            )
        seen[key] = path
        parts = key.split("/")
        for depth in range(1, len(parts)):
            folders.setdefault("/".join(parts[:depth]), path)
    for key, path in seen.items():
        if key in folders:
            raise WeightsError(f"the source names {path!a} as a file and {folders[key]!a} below it")


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _problem(path: str) -> str | None:
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if not path or size > MAX_PATH_BYTES:
        return f"has {size} bytes (1 to {MAX_PATH_BYTES} are allowed)"
    if path.startswith("/") or re.match(r"[A-Za-z]:", path):
        return "is absolute"
    if "\\" in path or not path.isprintable():
        return "has a backslash or a control character"
    if path == MANIFEST:
        return "is the appliance's own"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "does not stay in its folder"
        if len(part.encode()) > MAX_PART_BYTES:
            return f"has a part of more than {MAX_PART_BYTES} bytes"
        if part != part.strip() or part.endswith(".") or _DEVICE.fullmatch(part):
            return "would be another file on another file system"
    return None
