"""preflight, and the checks that `up` makes before it starts anything."""

import json

import pytest

from appliance.plan.model import LedgerLine, load_plan


@pytest.fixture
def greedy_plan(appliance, model, tmp_path):
    """A plan that adds up but wants 1 TiB of host memory beside the experts."""
    path = tmp_path / "greedy.json"
    appliance("plan", "make", "--model", model, "-o", path)
    plan = load_plan(path)
    more = LedgerLine(part="more", home="host", size_bytes=1 << 40, source="setting")
    rank = plan.ranks[0].model_copy(update={"ledger": (*plan.ranks[0].ledger, more)})
    plan.model_copy(update={"ranks": (rank,)}).write(path)
    return path


def failing(report: str) -> list[str]:
    return [f["check"] for f in json.loads(report)["findings"] if f["severity"] == "fail"]


def test_preflight_judges_by_the_plans_needs_and_a_failed_check_is_three(appliance, greedy_plan):
    said = appliance("preflight", "--plan", greedy_plan, "--json")
    assert said.code == 3
    failed = failing(said.out)
    assert failed
    words = [word for check in failed for word in ("--ignore", check)]
    ignored = appliance("preflight", "--plan", greedy_plan, "--json", *words)
    assert ignored.code == 4 and failing(ignored.out) == []
    assert appliance("preflight", "--plan", greedy_plan, *words, "--strict").code == 3


def test_up_refuses_what_the_machine_cannot_give_with_the_numbers(appliance, model, greedy_plan):
    said = appliance("up", "--model", model, "--plan", greedy_plan, "--dry-run")
    assert said.code == 3 and said.out == ""
    assert "this machine does not meet the plan's needs" in said.err and "--ignore" in said.err
    failed = failing(appliance("preflight", "--plan", greedy_plan, "--json").out)
    words = [word for check in failed for word in ("--ignore", check)]
    allowed = appliance("up", "--model", model, "--plan", greedy_plan, "--dry-run", *words)
    assert allowed.code == 0 and "vllm.entrypoints.cli.main serve" in allowed.out
    assert all(f"warning: {check}: " in allowed.err for check in failed)


def test_a_guard_rail_of_the_plan_is_ignored_by_its_own_name(appliance, model, greedy_plan):
    failed = failing(appliance("preflight", "--plan", greedy_plan, "--json").out)
    words = [word for check in failed for word in ("--ignore", check)]
    words += ["--ignore", "native-offload"]
    said = appliance("up", "--model", model, "--plan", greedy_plan, "--dry-run", *words)
    assert said.code == 0 and "warning: host-memory-margin: the plan takes 1" in said.err


def test_an_unknown_check_is_wrong_usage_with_the_nearest_one(appliance, model):
    for words in (["preflight"], ["up", "--model", model, "--dry-run"]):
        said = appliance(*words, "--ignore", "gpus-to-few")
        assert said.code == 2 and "did you mean 'gpus-too-few'?" in said.err


def test_a_recorded_machine_gives_the_same_report_as_the_machine_itself(appliance, tmp_path):
    here = appliance("preflight", "--gpus", 0, "--record", tmp_path / "machine")
    there = appliance("preflight", "--gpus", 0, "--host", tmp_path / "machine")
    assert here.out == there.out != "" and here.code == there.code


def test_a_folder_that_is_no_recording_is_wrong_usage(appliance, tmp_path):
    said = appliance("preflight", "--host", tmp_path)
    assert said.code == 2 and "cannot replay a machine" in said.err


def test_the_catalogue_lists_every_check_once(appliance):
    from preflight.checks import CHECKS

    listed = json.loads(appliance("preflight", "list", "--json").out)
    assert [row["id"] for row in listed] == [check.id for check in CHECKS]
    assert appliance("preflight", "list").out.count("\n") == len(CHECKS)


def test_a_plan_can_be_made_for_a_recorded_machine(appliance, model, tmp_path, request):
    machine = request.path.parents[2] / "machines" / "two-rtx-pro-6000-healthy"
    out = tmp_path / "plan.json"
    said = appliance("plan", "make", "--model", model, "--host", machine, "-o", out)
    assert said.code == 0, said.err
    assert [rank.device for rank in load_plan(out).ranks] == ["cuda", "cuda"]
    refused = appliance("up", "--model", model, "--plan", out, "--dry-run")
    assert refused.code == 1 and "which is not here" in refused.err
