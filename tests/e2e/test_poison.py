"""The two homes are apart: what is written to one is seen by its experts and by no others."""

import json

import pytest
from e2e.lab import MakeLab, run

from appliance.plan.planner import plan
from appliance.plan.request import Policy
from preflight import inspect
from preflight.source import Live


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_poisoning_the_host_arena_changes_exactly_the_host_experts(lab: MakeLab) -> None:
    model = lab("qwen3_moe")
    made = plan(
        inspect(Live()),
        model.checkpoint,
        None,
        Policy(device="cpu", host_share=0.4, context_tokens=128),
    )
    plan_file, out = model.folder / "poison.plan.json", model.folder / "poison.json"
    made.write(plan_file)
    script = "tests/e2e/poison.py"
    run([script, str(model.path), str(plan_file), str(out)], model.folder / "poison.log")
    found = json.loads(out.read_text())

    assert any(found["host"].values())
    assert found["changed"] == {layer: ids for layer, ids in found["host"].items() if ids}
    assert found["proof_before"][0]["problems"] == []
    problems = found["proof_after"][0]["problems"]
    assert problems and all("(host)" in problem for problem in problems)
