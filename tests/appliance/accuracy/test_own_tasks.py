"""The small set of our own, in the three public layouts: right answers score 1, others 0."""

import sys
from pathlib import Path

import pytest

from appliance.accuracy.scorers import score
from appliance.accuracy.tasks import read_task

OWN = Path(__file__).resolve().parents[2] / "own_tasks"
RIGHT = {
    "gsm8k": {
        "gsm8k/0": "9 trips of 14 cars are 126.", "gsm8k/1": "#### 22", "gsm8k/2": "85 minutes",
        "gsm8k/3": "Each gets $315.", "gsm8k/4": "404", "gsm8k/5": "It is 38", "gsm8k/6": "23",
        "gsm8k/7": "15 days",
    },
    "ifeval": {
        "ifeval/0": "the boats are all in the harbour and nobody is in a hurry to leave today",
        "ifeval/1": "* apples\n* pears\n* plums",
        "ifeval/2": "The first.\n***\nThe second.",
        "ifeval/3": '```json\n{"colour": "green"}\n```',
        "ifeval/4": "<<Low Water>>\nThe boats lay dry.\nP.S. Until the evening.",
        "ifeval/5": "Heute ist es sonnig, aber am Abend wird es wahrscheinlich regnen.",
        "ifeval/6": '"A harbour is a harbour."',
        "ifeval/7": "One of them.\n******\nAnother one.",
    },
    "humaneval": {
        "Own/0": "```python\ndef double(x):\n    return x * 2\n```",
        "Own/1": "```py\ndef largest(xs: List[int]) -> int:\n    return max(xs, default=0)\n```",
        "Own/2": "    return helper(s) == s",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(RIGHT))
def test_right_answers_are_right_and_the_answer_to_another_item_is_not(
    name: str, tmp_path: Path
) -> None:
    task = read_task(OWN / f"{name}.jsonl")
    answers = RIGHT[name]
    assert {item.id for item in task.items} == set(answers)
    ids = sorted(answers)
    for item in task.items:
        other = answers[ids[(ids.index(item.id) + 1) % len(ids)]]
        assert score(item, answers[item.id], sys.executable, tmp_path) == 1.0, item.id
        assert score(item, other, sys.executable, tmp_path) == 0.0, item.id
