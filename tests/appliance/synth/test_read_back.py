"""The checkpoint reader finds in a made checkpoint what was asked for."""

from pathlib import Path

import pytest

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.synth import SynthSpec, synthesize

FAMILIES = ("qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("bits", "codebook"),
    [((3, 3, 3), "mcg"), ((2, 3, 5), "3inst"), ((1.5, 2.5, 3.5), "mul1")],
)
def test_layers_experts_widths_and_codebook_come_back(
    tmp_path: Path, family: str, bits: tuple[float, float, float], codebook: str
) -> None:
    spec = SynthSpec(
        family=family, layers=3, experts=8, top_k=2, bits=bits, codebook=codebook,
        intermediate_size=384,
    )  # fmt: skip
    synthesize(tmp_path / "model", spec)
    checkpoint = read_checkpoint(tmp_path / "model")
    assert checkpoint.quantisation == "exl3"
    assert [layer.index for layer in checkpoint.layers] == [1, 2]
    assert {(len(layer.experts), layer.top_k) for layer in checkpoint.layers} == {(8, 2)}
    for expert in (expert for layer in checkpoint.layers for expert in layer.experts):
        assert tuple(p.bits for p in expert.projections) == bits
        assert {p.codebook for p in expert.projections} == {codebook}
        assert (expert.down.k, expert.down.n) == (384, 256)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_model_gives_no_cause_for_a_warning(tmp_path: Path, family: str) -> None:
    synthesize(tmp_path / "model", SynthSpec(family=family))
    assert read_checkpoint(tmp_path / "model").warnings == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_dense_layers_has_experts_in_all(tmp_path: Path, family: str) -> None:
    synthesize(tmp_path / "model", SynthSpec(family=family, layers=2, dense_layers=0))
    assert [layer.index for layer in read_checkpoint(tmp_path / "model").layers] == [0, 1]
