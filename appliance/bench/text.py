"""Text of a wanted length that is always the same for the same key: real source code.

Random words would route to other experts and draft worse than what people send. The sources of
Python's own standard library are on every machine, and are code. How many tokens a text has only
the server knows: its usage is what is reported.
"""

from __future__ import annotations

import hashlib
import sysconfig
from functools import lru_cache
from pathlib import Path

CHARACTERS_PER_TOKEN = 3.5  # of code, for tokenizers with some 100,000 tokens


@lru_cache
def corpus() -> str:
    """All top-level modules of the standard library, in order of name."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n".join(
        file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.glob("*.py"))
    )


def text(key: str, tokens: int, characters_per_token: float = CHARACTERS_PER_TOKEN) -> str:
    """About `tokens` tokens of code. Another key starts elsewhere in the corpus."""
    wanted = max(1, round(tokens * characters_per_token))
    source = corpus()
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % len(source)
    # The first line is unique to the key: a cache must not find what it never saw.
    taken = f"# {key}\n" + source[start : start + wanted]
    while len(taken) < wanted:
        taken += source[: wanted - len(taken)]
    return taken[:wanted]
