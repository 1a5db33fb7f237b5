"""The words nvidia-smi uses where it has no value, and how its numbers are written."""

from __future__ import annotations

import re

# Bracketed or bare: no value is known. `ERR!` and a required reset are signs of a fault.
NOTHING = re.compile(
    r"\[?(?:N/A|Not Supported|Not Available|Unknown Error|Insufficient Permissions|Unknown|None|"
    r"Requested functionality has been deprecated|No Devices?|Not Active)\]?",
    re.I,
)
RESET = re.compile(r"requires reset", re.I)
LOST = re.compile(r"GPU is lost", re.I)
ERROR = "ERR!"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def value(text: str | None) -> str | None:
    """The text, or None where it only says that there is no value."""
    text = (text or "").strip()
    if not text or NOTHING.fullmatch(text) or fault(text):
        return None
    return text


def fault(text: str | None) -> str | None:
    """What a value says is broken: `ERR!`, a required reset, a lost card."""
    text = (text or "").strip()
    if ERROR in text:
        return "nvidia-smi shows ERR!"
    if RESET.search(text):
        return "GPU requires reset"
    return "GPU is lost" if LOST.search(text) else None


def number(text: str | None) -> int | None:
    """The whole number a value starts with, without its unit: `5`, `16x`, `98 W` -> 98."""
    match = re.match(r"(\d+)(?:\.\d+)?\s*(?:x|C|W|MHz|%)?$", value(text) or "")
    return int(match.group(1)) if match else None


def size(text: str | None) -> int | None:
    """Bytes of `40448 MiB`; None without a unit, since it could be anything."""
    match = re.match(r"(\d+)\s*([KMG]iB)$", value(text) or "")
    return int(match.group(1)) * UNITS[match.group(2)] if match else None


def milliwatts(text: str | None) -> int | None:
    match = re.match(r"(\d+(?:\.\d+)?)\s*W$", value(text) or "")
    return round(float(match.group(1)) * 1000) if match else None


def switch(text: str | None) -> bool | None:
    """Enabled, On, Yes -> True; their opposites -> False; anything else is not known."""
    word = (text or "").strip().lower()
    if word in ("enabled", "on", "yes", "active"):
        return True
    return False if word in ("disabled", "off", "no") else None


def known(sizes: list[int | None]) -> tuple[int, ...] | None:
    """The sizes that are known; None where none is."""
    return tuple(s for s in sizes if s is not None) or None
