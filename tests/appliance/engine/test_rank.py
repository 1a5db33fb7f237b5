"""A process of the engine takes only a plan that was made for what it is."""

from pathlib import Path

import pytest
import torch

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.synth import SynthSpec, synthesize
from appliance.engine import compat, rank
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from preflight import inspect
from preflight.source import Live

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")


@pytest.fixture
def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher passed to an engine: a plan for two ranks of a model."""
    synthesize(tmp_path / "model", SynthSpec(layers=1, dense_layers=0, experts=4, top_k=2))
    policy = Policy(device="cpu", tensor_parallel=2, host_share=0.5, context_tokens=128)
    made = plan(inspect(Live()), read_checkpoint(tmp_path / "model"), None, policy)
    made.write(tmp_path / "plan.json")
    given = {"plan": str(tmp_path / "plan.json"), "checkpoint": str(tmp_path / "model")}
    monkeypatch.setattr(compat, "appliance_settings", lambda: given)
    monkeypatch.setattr(rank, "_state", None)


@pytest.mark.parametrize(("number", "ranks"), [(0, 1), (1, 4), (3, 4)])
def test_a_plan_for_another_number_of_ranks_is_refused(
    two_ranks: None, number: int, ranks: int
) -> None:
    with pytest.raises(ValueError, match=f"is for 2 ranks and this engine has {ranks}: its exp"):
        rank.open_state(number, ranks, CPU)


def test_each_rank_of_the_plan_holds_its_share_of_every_expert(two_ranks: None) -> None:
    state = rank.open_state(1, 2, CPU)
    assert (state.arena.shard.rank, state.arena.shard.parts) == (1, 2)
    assert rank.open_state(1, 2, CPU) is rank.state() is state
