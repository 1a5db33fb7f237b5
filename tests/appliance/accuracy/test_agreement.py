"""Our scorers against lm-evaluation-harness' own scores, item by item (see lm_eval_agreement)."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lm_eval_agreement.answers import KINDS, PROSE

from appliance.accuracy import sandbox
from appliance.accuracy.instructions import CHECKS, follows
from appliance.accuracy.scorers import score
from appliance.accuracy.tasks import read_task
from appliance.errors import UsageError

RECORDED = Path(__file__).resolve().parents[2] / "lm_eval_agreement" / "recorded"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def item(folder: Path, doc: dict[str, Any]) -> Any:
    file = folder / "one.jsonl"
    file.write_text(json.dumps(doc) + "\n")
    return read_task(file).items[0]


def test_every_number_is_scored_as_lm_eval_scores_it(tmp_path: Path) -> None:
    every = lines("gsm8k")
    differing = [
        line
        for line in every
        if score(item(tmp_path, line["doc"]), line["resp"], "", tmp_path) != line["score"]
    ]
    assert not differing
    assert len(every) == 230
    # An eighth of the answers is right, in many ways to write a number.
    assert 20 < sum(line["score"] for line in every) < 100


def test_every_kind_of_instruction_is_scored_as_lm_eval_scores_it() -> None:
    total, followed, differing = 0, 0, Counter[str]()
    for line in lines("ifeval"):
        (kind,), given = line["doc"]["instruction_id_list"], line["doc"]["kwargs"]
        theirs = [mark == "1" for mark in line["scores"]]
        ours = [follows(answer, [kind], given) == [True] for answer in PROSE]
        assert len(theirs) == len(PROSE)
        total += len(PROSE)
        followed += sum(theirs)
        differing[kind] += sum(a != b for a, b in zip(ours, theirs, strict=True))
    assert set(differing) == set(CHECKS) == set(KINDS) and len(CHECKS) == 25
    # Each kind is met by some answers and missed by others, or the comparison would say little.
    assert total == 52 * 60 and 600 < followed < 2500
    assert +differing == Counter()


def test_every_program_is_scored_as_lm_eval_scores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 4)  # one of them never ends
    for line in lines("humaneval_instruct"):
        ours = score(item(tmp_path, line["doc"]), line["resp"], sys.executable, tmp_path / "box")
        assert ours == line["score"], line["resp"]
    assert {line["score"] for line in lines("humaneval_instruct")} == {0.0, 1.0}


def test_an_item_with_several_instructions_needs_all_of_them(tmp_path: Path) -> None:
    doc = {
        "key": 7,
        "prompt": "Say it in lower case, without commas.",
        "instruction_id_list": ["change_case:english_lowercase", "punctuation:no_comma"],
        "kwargs": [{"relation": None}, {}],
    }
    one = item(tmp_path, doc)
    assert one.id == "ifeval/7" and one.prompt.startswith("Say it")
    assert score(one, "the boats are all in the harbour today", "", tmp_path) == 1.0
    assert score(one, "the boats, all of them, are in the harbour", "", tmp_path) == 0.0
    assert score(one, "", "", tmp_path) == 0.0


def test_a_kind_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="instructions startend:rhyme"):
        follows("x", ["startend:rhyme"], [{}])
    with pytest.raises(UsageError, match="lacks its argument 'num_words'"):
        follows("x", ["length_constraints:number_words"], [{"num_words": None}])
