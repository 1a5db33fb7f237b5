"""Items to ask, read from local files that the operator brings. None of the data is ours to ship.

    gsm8k.jsonl       https://github.com/openai/grade-school-math     {"question", "answer"}
    input_data.jsonl  https://huggingface.co/datasets/google/IFEval   {"key", "prompt",
                                                                       "instruction_id_list",
                                                                       "kwargs"}
    HumanEval.jsonl   https://github.com/openai/human-eval            {"task_id", "prompt", "test",
                                                                       "entry_point"}
    own.jsonl         any file of ours                                {"id", "prompt", "answer"}

A frozen subset is the items whose sha256 of seed and id is smallest, so it is the same on every
machine and does not depend on the order of the file. Ids and the file's sha256 go into the record.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from appliance.errors import UsageError

Scorer = Literal["number", "instructions", "code"]
SUBSET = 150
ASK_NUMBER = (
    "Solve this problem. Think step by step, then end with one line of the form "
    "'#### <number>'.\n\n"
)
ASK_CODE = "Complete this Python function. Answer with the whole function in one code block.\n\n"


@dataclass(frozen=True)
class Item:
    """One question.

    `reference`: the number; the instructions and their arguments, as JSON; or the test that must
    run after the answer, and then `start` is the code that the answer continues or writes anew.
    """

    id: str
    prompt: str
    scorer: Scorer
    reference: str
    group: str
    start: str = ""


@dataclass(frozen=True)
class Task:
    """A frozen subset of a file. `sha256`: of the whole file, as it was read."""

    name: str
    sha256: str
    seed: int
    items: tuple[Item, ...]


def read_task(
    file: Path, *, count: int = SUBSET, seed: int = 1, expected_sha256: str | None = None
) -> Task:
    """The frozen subset of a local file. Raises UsageError on another checksum or format."""
    raw = file.read_bytes()
    found = hashlib.sha256(raw).hexdigest()
    if expected_sha256 is not None and found != expected_sha256:
        raise UsageError(
            f"{file} has sha256 {found[:16]}..., {expected_sha256[:16]}... was expected",
            fix="the file that the reference was recorded with",
        )
    text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
    rows = [_row(file, n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not rows:
        raise UsageError(f"{file} holds no items")
    format_ = next((f for f in FORMATS if set(f[1]) <= set(rows[0])), None)
    if format_ is None:
        raise UsageError(
            f"{file}: items with the keys {', '.join(sorted(rows[0]))} are not known",
            fix="GSM8K, IFEval, HumanEval, or items of {id, prompt, answer}",
        )
    name, keys, make = format_
    for number, row in enumerate(rows, 1):
        if not set(keys) <= set(row):
            raise UsageError(f"{file} item {number} lacks {', '.join(set(keys) - set(row))}")
    items = [make(number, row) for number, row in enumerate(rows)]
    if len({item.id for item in items}) < len(items):
        raise UsageError(f"{file} has items with equal ids")
    items.sort(key=lambda item: hashlib.sha256(f"{seed}/{item.id}".encode()).digest())
    return Task(name, found, seed, tuple(items[:count]))


def _gsm8k(number: int, row: Mapping[str, Any]) -> Item:
    answer = str(row["answer"]).rpartition("####")[2].strip()
    return Item(f"gsm8k/{number}", ASK_NUMBER + row["question"], "number", answer, str(number))


def _human_eval(number: int, row: Mapping[str, Any]) -> Item:
    test = f"{row['test']}\n\ncheck({row['entry_point']})\n"
    name = str(row["task_id"])
    prompt = ASK_CODE + f"```python\n{row['prompt']}\n```"
    return Item(name, prompt, "code", test, name, start=str(row["prompt"]))


def _ifeval(number: int, row: Mapping[str, Any]) -> Item:
    wanted = {"kinds": row["instruction_id_list"], "arguments": row["kwargs"]}
    name = f"ifeval/{row['key']}"
    return Item(name, str(row["prompt"]), "instructions", json.dumps(wanted), name)


def _own(number: int, row: Mapping[str, Any]) -> Item:
    name = str(row["id"])
    prompt = ASK_NUMBER + str(row["prompt"])
    return Item(name, prompt, "number", str(row["answer"]), str(row.get("group", name)))


Format = tuple[str, tuple[str, ...], Callable[[int, Mapping[str, Any]], Item]]
FORMATS: tuple[Format, ...] = (
    ("gsm8k", ("question", "answer"), _gsm8k),
    ("humaneval", ("task_id", "prompt", "test", "entry_point"), _human_eval),
    ("ifeval", ("key", "prompt", "instruction_id_list", "kwargs"), _ifeval),
    ("own", ("id", "prompt", "answer"), _own),
)


def _row(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as problem:
        raise UsageError(f"{file} line {number} is not JSON: {problem.msg}") from problem
    if not isinstance(found, dict):
        raise UsageError(f"{file} line {number} is no JSON object")
    return found
