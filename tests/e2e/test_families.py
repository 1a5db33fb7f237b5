"""Families beside the two of test_same_tokens: right answers with experts in both homes."""

from pathlib import Path

import pytest
from e2e.lab import Lab

from appliance.checkpoint.synth import SynthSpec, synthesize
from appliance.engine.expectations import write_expectations
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from preflight import inspect
from preflight.source import Live


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["glm4_moe", "mixtral"])
def test_a_family_gives_known_answers_with_half_of_its_experts_on_the_host(
    tmp_path: Path, family: str
) -> None:
    synthesize(tmp_path / "model", SynthSpec(family=family, dense_layers=int(family != "mixtral")))
    known = write_expectations(tmp_path / "model").cases
    model = Lab(tmp_path, tmp_path / "model")
    policy = Policy(device="cpu", host_share=0.5, streams=4, context_tokens=512)
    made = plan(inspect(Live()), model.checkpoint, None, policy)
    asked = {"prompts": [case.prompt for case in known], "tokens": len(known[0].tokens)}
    served = model.generate("half", made, asked)
    assert [rank["problems"] for rank in served["proof"]] == [[]]
    assert [row["tokens"] for row in served["outputs"]] == [list(case.tokens) for case in known]
    picks = served["state"][0]["picks"]
    assert picks["device"] and picks["host"]
