"""1 for a right answer, 0 for a wrong one, item by item.

Numbers follow lm-evaluation-harness' gsm8k `flexible-extract`: the last number of the answer, with
commas, dollar signs and a closing full stop taken out of both, compared as text. Instructions are
IFEval's, strict (instructions.py). Code passes if it and the item's test run to their end.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from appliance.accuracy.instructions import follows
from appliance.accuracy.sandbox import runs
from appliance.accuracy.tasks import Item

NUMBER = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def score(item: Item, answer: str, python: str, folder: Path) -> float:
    """`python` runs code answers, in a sandbox below `folder`."""
    if item.scorer == "number":
        return float(last_number(answer) == _plain(item.reference))
    if item.scorer == "instructions":
        wanted = json.loads(item.reference)
        return float(all(follows(answer, wanted["kinds"], wanted["arguments"])))
    return float(runs(f"{program(item.start, answer)}\n\n{item.reference}", python, folder))


def last_number(answer: str) -> str:
    """The last number, plain; `[invalid]` where there is none, which equals no reference."""
    found = NUMBER.findall(answer)
    if not found:
        return "[invalid]"
    return _plain(next(part for part in found[-1] if part))


def program(start: str, answer: str) -> str:
    """The code to test: what the item gave, and the answer as its continuation or a whole anew.

    A whole function comes after the item's own beginning, which holds imports it may lean on.
    """
    text = code(answer)
    name = re.findall(r"^(?:async )?def (\w+)", start, re.MULTILINE)
    whole = not name or re.search(rf"^(?:async )?def {name[-1]}\b", text, re.MULTILINE)
    if not whole:
        return start + text
    return f"{start}\n{text}" if _compiles(start) else text


def code(answer: str) -> str:
    """The last fenced block; without one all up to a closing fence, or the whole answer."""
    blocks = BLOCK.findall(answer)
    return str(blocks[-1]) if blocks else answer.partition("```")[0]


def _compiles(text: str) -> bool:
    try:
        compile(text, "start", "exec")
    except SyntaxError:
        return False
    return True


def _plain(text: str) -> str:
    for pattern in IGNORED:
        text = pattern.sub("", text)
    return text.strip().lower()
