"""Which method each module of a model gets, by what is stored of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.checkpoint.synth import SynthSpec, synthesize
from appliance.engine import compat
from appliance.engine.config import Exl3Config
from appliance.engine.linear import Exl3LinearMethod, Part, placeholder
from expert_kernels import reference

pytestmark = pytest.mark.engine
ATTENTION = "language_model.model.layers.1.attn"


class Rest:
    """vLLM's own configuration for linears in FP8: it is asked, and answers with the prefix."""

    weight_block_size = (32, 32)

    def get_quant_method(self, layer: Any, prefix: str) -> str:
        return f"FP8 {prefix}"


@pytest.fixture
def thin(tmp_path: Path) -> Path:
    spec = SynthSpec(family="deepseek_v41", layers=3, dense_layers=0, experts=4, top_k=2,
                     dense_format="fp8")  # fmt: skip
    synthesize(tmp_path / "model", spec)
    return tmp_path / "model"


def linear() -> Any:
    return object.__new__(compat.LinearBase)


def test_linears_with_scales_are_what_the_release_says(
    thin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def non_routed(model_type: str, config: Any) -> Rest:
        asked.append((model_type, config["quant_method"], config["weight_block_size"]))
        return Rest()

    monkeypatch.setattr(compat, "non_routed", non_routed)
    config = Exl3Config.from_config({})
    assert config.weight_block_size is None
    config.maybe_update_config(str(thin))
    assert asked == [("deepseek_v41", "fp8", [32, 32])]
    assert config.weight_block_size == (32, 32)
    for scaled in ("fused_wqa_wkv", "wq_b", "wo_a", "wo_b", "indexer.wq_b"):
        prefix = f"{ATTENTION}.{scaled}"
        assert config.get_quant_method(linear(), prefix) == f"FP8 {prefix}"
    shared = "language_model.model.layers.0.ffn.shared_experts"
    for merged in ("gate_up_proj", "down_proj"):
        assert config.get_quant_method(linear(), f"{shared}.{merged}") == f"FP8 {shared}.{merged}"
    for plain in (f"{ATTENTION}.indexer.wk", "language_model.model.layers.1.engram.wkv"):
        method = config.get_quant_method(linear(), plain)
        assert isinstance(method, compat.UnquantizedLinearMethod)


def test_scales_that_the_config_does_not_explain_are_refused(thin: Path) -> None:
    file = thin / "config.json"
    file.write_text(file.read_text().replace("non_routed_quantization", "not_said"))
    with pytest.raises(ValueError, match=r"linears of .* have scales"):
        Exl3Config().maybe_update_config(str(thin))


def test_another_kind_of_non_routed_weights_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'awq' is not supported"):
        compat.non_routed("deepseek_v41", {"quant_method": "awq"})


@pytest.mark.parametrize(
    ("dtype", "model_type", "factor", "is_wrong"),
    [
        (torch.float16, "glm4_moe", 1.5, True),
        (torch.bfloat16, "glm4_moe", 1.5, False),
        (torch.float16, "glm4_moe", 1.0, False),
        (torch.float16, "deepseek_v3", 1.5, False),  # its decoder layer undoes it
    ],
)
def test_float16_is_refused_where_vllm_scales_the_shared_expert_wrongly(
    dtype: torch.dtype, model_type: str, factor: float, is_wrong: bool
) -> None:
    said = compat.wrong_in(dtype, model_type, {"routed_scaling_factor": factor})
    assert (said is not None) == is_wrong
    assert said is None or "divides the shared expert of a glm4_moe by 1.5" in said


def test_a_weight_that_the_model_reads_itself_is_made_dense() -> None:
    """DeepSeek-V4 multiplies by wo_a.weight, group by group, and sets is_bmm on the module."""
    generator = torch.Generator().manual_seed(2)
    shape = (8, 16, 48)
    trellis = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
    tensors = {"trellis": trellis, "suh": torch.ones(128).half(), "svh": torch.ones(256).half()}
    method, layer = Exl3LinearMethod("wo_a"), torch.nn.Module()
    method.parts = [Part((0, 128), (0, 256), 256, dict(tensors))]
    layer.register_parameter("weight", placeholder(None, torch.bfloat16))
    method.process_weights_after_loading(layer)
    assert layer.weight.numel() == 0  # not asked for
    layer.is_bmm = True  # type: ignore[assignment]
    method.process_weights_after_loading(layer)
    assert torch.equal(layer.weight, reference.dequantise(*tensors.values(), "3inst").T.bfloat16())
