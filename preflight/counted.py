"""A number and its noun, as people say them: `1 stream`, `4 streams`, `1,024 pages`."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`plural` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
