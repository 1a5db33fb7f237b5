"""The verdict of serve_gpu.py on what two cards said, itself tested without any card."""

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from same_tokens import CLEAR, verdict
from served import TEXTS, Case

CASES = {"decided": Case("decided", 0.3), "two": Case("decided", 0.3, ranks=2)}
LENGTHS = {what: tokens for what, (_, tokens) in TEXTS.items()}
TEXT = 3  # the one that is changed
UNSURE = 20  # its step of which one card is not sure


def run(slots: str = "none") -> dict[str, Any]:
    said: dict[str, Any] = {"slots": slots, "picks_not_here": [0]}
    for what, length in LENGTHS.items():
        said[what] = [list(range(row, row + length)) for row in range(40)]
        said[f"{what}_leads"] = [[1.0] * length for _ in range(40)]
        said[f"{what}_leads"][TEXT][UNSURE] = CLEAR / 2
        said[f"{what}_rows"], said[f"{what}_promotions"] = [40], [0]
    return said


def other_from(said: dict[str, Any], row: int, step: int) -> None:
    for what in LENGTHS:
        said[what][row][step:] = [7] * len(said[what][row][step:])


@pytest.fixture
def found() -> dict[str, Any]:
    wrong = run("two experts swapped")
    for row in range(30):
        other_from(wrong, row, 5)
    case = {"runs": [run(), run()], "proof": {"ok": True}, "wrong": [wrong]}
    return {"decided": case, "two": deepcopy(case)}


def test_the_same_tokens_pass(found: dict[str, Any]) -> None:
    assert verdict(CASES, found, asked=2)


def test_two_cards_may_part_where_one_is_not_sure(found: dict[str, Any]) -> None:
    for said in found["two"]["runs"]:
        other_from(said, TEXT, UNSURE)
    assert verdict(CASES, found, asked=2)


@pytest.mark.parametrize(("row", "step"), [(TEXT, UNSURE - 1), (TEXT, UNSURE + 1), (0, 31)])
def test_two_cards_may_not_part_where_one_is_sure(
    found: dict[str, Any], row: int, step: int
) -> None:
    for said in found["two"]["runs"]:
        other_from(said, row, step)
    assert not verdict(CASES, found, asked=2)


def test_runs_on_the_same_ranks_may_not_part_at_all(found: dict[str, Any]) -> None:
    other_from(found["two"]["runs"][1], TEXT, UNSURE)
    assert not verdict(CASES, found, asked=2)


def test_swapped_experts_that_change_nothing_mean_that_nothing_was_tested(
    found: dict[str, Any],
) -> None:
    found["two"]["wrong"] = [run("two experts swapped")]
    assert not verdict(CASES, found, asked=2)


def test_without_one_card_there_is_nothing_to_compare_with(found: dict[str, Any]) -> None:
    del found["decided"]
    assert not verdict(CASES, found, asked=1)


def test_a_case_that_died_and_a_proof_with_problems_fail(found: dict[str, Any]) -> None:
    assert not verdict(CASES, found, asked=3)
    found["two"]["proof"] = {"ok": False}
    assert not verdict(CASES, found, asked=2)
