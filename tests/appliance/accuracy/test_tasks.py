"""Tasks from local files, scorers, and the sandbox: layouts are the public ones, items our own."""

import json
import sys
from pathlib import Path

import pytest

from appliance.accuracy.scorers import code, last_number, score
from appliance.accuracy.tasks import Item, read_task
from appliance.errors import UsageError


def write(file: Path, rows: list[dict[str, object]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def sums(count: int) -> list[dict[str, object]]:
    return [{"id": f"sum/{n}", "prompt": f"{n} + {n}?", "answer": 2 * n} for n in range(count)]


def test_a_frozen_subset_does_not_depend_on_the_order_of_the_file(tmp_path: Path) -> None:
    rows = sums(500)
    one = read_task(write(tmp_path / "a.jsonl", rows))
    two = read_task(write(tmp_path / "b.jsonl", rows[::-1]))
    assert one.items == two.items and len(one.items) == 150
    assert one.sha256 != two.sha256
    assert read_task(tmp_path / "a.jsonl", seed=2).items != one.items


def test_a_file_with_another_checksum_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", sums(3))
    good = read_task(file).sha256
    assert read_task(file, expected_sha256=good).sha256 == good
    with pytest.raises(UsageError, match="was expected"):
        read_task(file, expected_sha256="0" * 64)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no items"),
        ('{"q": 1}\n', "keys q"),
        ("{\n", "line 1 is not JSON"),
        ('{"id": 1, "prompt": "x", "answer": 1}\n{"id": 2}\n', "item 2 lacks"),
        ('{"id": 1, "prompt": "x", "answer": 1}\n' * 2, "equal ids"),
    ],
)
def test_a_file_that_is_no_task_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_task(tmp_path / "t.jsonl")


def test_both_public_layouts_are_read(tmp_path: Path) -> None:
    row = {"question": "Two and three?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
    (item,) = read_task(write(tmp_path / "g.jsonl", [row])).items
    assert (item.reference, item.scorer) == ("5", "number")
    assert "Two and three?" in item.prompt
    task = {
        "task_id": "Own/0",
        "prompt": "def double(x):\n",
        "test": "def check(f):\n    assert f(2) == 4\n",
        "entry_point": "double",
    }
    (item,) = read_task(write(tmp_path / "h.jsonl", [task])).items
    answer = "Here:\n```python\ndef double(x):\n    return 2 * x\n```\nDone."
    assert score(item, answer, sys.executable, tmp_path / "box") == 1.0
    assert score(item, answer.replace("2 *", "3 *"), sys.executable, tmp_path / "box") == 0.0


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("so it is\n#### 1,234", "1234"),
        ("first 7, then $18.", "18"),
        ("the answer is -3", "-3"),
        ("costs $2.50 each, in all 10", "10"),
        ("none at all", "[invalid]"),
        ("it is 42.", "42"),
    ],
)
def test_the_last_number_is_taken_as_the_public_scorer_takes_it(answer: str, number: str) -> None:
    assert last_number(answer) == number


def test_a_missing_answer_is_wrong_even_against_an_empty_reference() -> None:
    assert score(Item("x", "", "number", "", "x"), "no number", "", Path()) == 0.0


def test_code_outside_a_block_is_taken_whole() -> None:
    assert code("x = 1") == "x = 1"
    assert code("```\na\n```\n```py\nb\n```") == "b\n"
