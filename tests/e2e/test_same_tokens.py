"""Where an expert lives, and on how many ranks, changes no token.

The oracle is vLLM's own unquantised path on the same weights, dequantised to dense tensors.
Everything runs in float32. Between plans of one rank the outputs are equal to the bit. Over ranks,
and against the dense weights, sums are taken in another order: log-probabilities may differ by the
rounding of float32, and are compared with TOLERANCE.
"""

from typing import Any

import pytest
from e2e.lab import OVERLAY, Lab, MakeLab, Outputs

from appliance.engine.dense_twin import write_dense_twin
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from appliance.weights.repack import repack
from preflight import inspect
from preflight.source import Live

TOLERANCE = 1e-3  # natural log; the smallest gap between first and second choice is wider
# Share of the experts on the host, and cache slots a layer.
PLACEMENTS = {"resident": (0.0, 0), "half": (0.5, 0), "host": (1.0, 0), "slots": (0.75, 2)}


def serve(
    lab: Lab,
    name: str,
    prompts: dict[str, Any],
    share: float,
    environment: dict[str, str] | None = None,
    slots: int = 0,
    **options: Any,
) -> Outputs:
    ranks = options.get("tensor_parallel_size", 1)
    policy = Policy(
        device="cpu",
        host_share=share,
        cache_slots=slots,
        tensor_parallel=ranks,
        expert_parallel=options.get("enable_expert_parallel", False),
        streams=20,
        context_tokens=512,
    )
    made = plan(inspect(Live()), lab.checkpoint, None, policy)
    found = lab.generate(name, made, prompts, environment, **options)
    assert [rank["problems"] for rank in found["proof"]] == [[]] * ranks
    return found


def tokens(outputs: Outputs) -> list[list[int]]:
    return [row["tokens"] for row in outputs["outputs"]]


def largest_difference(a: Outputs, b: Outputs) -> float:
    return max(
        abs(p - q)
        for x, y in zip(a["outputs"], b["outputs"], strict=True)
        for p, q in zip(x["logprobs"], y["logprobs"], strict=True)
    )


@pytest.mark.engine
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_placement_ranks_and_format_change_no_token(
    lab: MakeLab, prompts: dict[str, Any], family: str
) -> None:
    """20 prompts x 64 tokens: four placements, both vLLMs, TP 2, EP 2, dense weights agree."""
    model = lab(family)
    served = {
        name: serve(model, name, prompts, share, slots=slots)
        for name, (share, slots) in PLACEMENTS.items()
    }
    packed = model.folder / "packed"
    repack(model.checkpoint, packed, 1, lambda done, total: None)
    served["in a file"] = serve(model, "file", prompts, 0.75, slots=2, arena=packed)
    assert served["in a file"]["state"][0]["host_pages"] == "file"
    assert len(tokens(served["half"])) == 20
    assert {len(row) for row in tokens(served["half"])} == {64}
    for outputs in served.values():
        assert tokens(outputs) == tokens(served["half"])
        assert largest_difference(outputs, served["half"]) == 0.0

    picks = {name: outputs["state"][0]["picks"] for name, outputs in served.items()}
    assert picks["resident"]["host"] == 0 < picks["resident"]["device"]
    assert picks["host"]["device"] == 0
    assert picks["half"]["device"] and picks["half"]["host"]
    assert picks["slots"]["slot"] and picks["slots"]["host"]
    assert served["slots"]["state"][0]["promotions"] > 0
    assert served["resident"]["state"][0]["host_bytes_read"] == 0
    assert served["host"]["state"][0]["host_bytes_read"] > 0

    shipped = serve(model, "shipped", prompts, 0.5, OVERLAY)
    assert shipped["vllm"].startswith("0.33.0")
    assert served["half"]["vllm"].startswith("0.32.0")
    assert tokens(shipped) == tokens(served["half"])

    two: dict[str, Any] = {"tensor_parallel_size": 2}
    over_ranks = {
        "tp2": serve(model, "tp2", prompts, 0.75, slots=2, **two),
        "ep2": serve(model, "ep2", prompts, 0.75, slots=2, enable_expert_parallel=True, **two),
    }
    for outputs in over_ranks.values():
        assert all(rank["promotions"] > 0 for rank in outputs["state"])
    dense = model.folder / "dense"
    write_dense_twin(model.path, dense)
    over_ranks["dense"] = model.generate_stock("dense", dense, prompts)
    for name, outputs in over_ranks.items():
        assert tokens(outputs) == tokens(served["half"]), name
        assert largest_difference(outputs, served["half"]) < TOLERANCE, name
