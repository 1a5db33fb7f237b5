"""plan diff: which experts moved."""

import pytest


@pytest.fixture
def plans(appliance, model, tmp_path):
    made = tmp_path / "half.json", tmp_path / "quarter.json"
    for path, share in zip(made, (0.5, 0.25), strict=True):
        appliance("plan", "make", "--model", model, "-o", path, "--host-share", share)
    return made


def test_a_diff_says_what_moved_and_an_equal_plan_that_nothing_did(appliance, plans):
    said = appliance("plan", "diff", *plans)
    assert said.code == 0 and "made from another policy" in said.out and "host" in said.out
    assert appliance("plan", "diff", plans[0], plans[0]).out == "the plans are equal\n"


def test_plans_of_two_models_are_refused(appliance, plans, tmp_path):
    appliance("weights", "synth", tmp_path / "other", "--experts", 8)
    other = tmp_path / "other.json"
    appliance("plan", "make", "--model", tmp_path / "other", "-o", other)
    said = appliance("plan", "diff", plans[0], other)
    assert said.code == 2 and "different checkpoints" in said.err
