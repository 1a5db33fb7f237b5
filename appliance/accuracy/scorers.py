"""1 for a right answer, 0 for a wrong one, item by item.

Numbers follow lm-evaluation-harness' gsm8k `flexible-extract`: the last number of the answer, with
commas, dollar signs and a closing full stop taken out of both, compared as text.
"""

from __future__ import annotations

import re
from pathlib import Path

from appliance.accuracy.sandbox import runs
from appliance.accuracy.tasks import Item

NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def score(item: Item, answer: str, python: str, folder: Path) -> float:
    """`python` runs code answers, in a sandbox below `folder`."""
    if item.scorer == "number":
        return float(last_number(answer) == _plain(item.reference))
    return float(runs(f"{code(answer)}\n\n{item.reference}", python, folder))


def last_number(answer: str) -> str:
    """The last number, plain; `[invalid]` where there is none, which equals no reference."""
    found = NUMBER.findall(answer)
    if not found:
        return "[invalid]"
    return _plain(next(part for part in found[-1] if part))


def code(answer: str) -> str:
    """The last fenced block; the whole answer where there is none."""
    blocks = BLOCK.findall(answer)
    return str(blocks[-1]) if blocks else answer


def _plain(text: str) -> str:
    for pattern in IGNORED:
        text = pattern.sub("", text)
    return text.strip().lower()
