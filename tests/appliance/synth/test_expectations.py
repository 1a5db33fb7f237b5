"""The oracle: transformers' own classes on decoded weights."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.checkpoint.synth import SynthSpec, synthesize
from appliance.engine.dense_twin import write_dense_twin
from appliance.engine.expectations import CLEAR_LEAD, Expectations, write_expectations
from appliance.errors import CheckpointError
from appliance.serve.answers import read_expectations
from expert_kernels import reference

pytestmark = pytest.mark.engine

FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices: a second thread costs more in waiting than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Expectations]]:
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp("synth") / family
        synthesize(folder, SynthSpec(family=family, dense_layers=int(family != "mixtral")))
        made[family] = (folder, write_expectations(folder))
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_the_launcher_reads_what_is_written(
    models: dict[str, tuple[Path, Expectations]], family: str
) -> None:
    folder, written = models[family]
    read = read_expectations(folder)
    assert read is not None
    assert [(c.prompt, c.tokens, c.leads) for c in read] == [
        (c.prompt, c.tokens, c.leads) for c in written.cases
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_is_clear_and_says_something(
    models: dict[str, tuple[Path, Expectations]], family: str
) -> None:
    _, found = models[family]
    assert len(found.cases) == 4
    assert found.smallest_lead >= CLEAR_LEAD
    for case in found.cases:
        assert len(case.tokens) == len(case.leads) == 16
        assert len(set(case.tokens)) > 8  # no loop: context and experts have a say


def test_one_damaged_expert_changes_the_answers(
    models: dict[str, tuple[Path, Expectations]], tmp_path: Path
) -> None:
    folder, good = models["qwen3_moe"]
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    name = "model.layers.2.mlp.experts.5.down_proj.svh"
    for file in bad.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file(tensors | {name: -tensors[name]}, file)
    assert [c.tokens for c in write_expectations(bad).cases] != [c.tokens for c in good.cases]


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
def test_the_dense_twin_multiplies_like_the_quantised_linear(tmp_path: Path, codebook: str) -> None:
    spec = SynthSpec(codebook=codebook, bits=(2, 3, 4), experts=4, layers=2)
    synthesize(tmp_path / "model", spec)
    write_dense_twin(tmp_path / "model", tmp_path / "twin")
    dense = load_file(tmp_path / "twin" / "model.safetensors")
    stored: dict[str, Any] = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        stored |= load_file(file)
    name = "model.layers.1.mlp.experts.3.up_proj"
    x = torch.randn(5, 256, dtype=torch.float64)
    through = reference.linear(
        x, *(stored[f"{name}.{part}"] for part in ("trellis", "suh", "svh")), codebook
    )
    torch.testing.assert_close(
        x @ dense[f"{name}.weight"].double().T, through, rtol=1e-5, atol=1e-5
    )


def test_a_folder_that_is_no_checkpoint_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        write_expectations(tmp_path)


def test_the_dense_twin_knows_nothing_of_exl3(tmp_path: Path) -> None:
    synthesize(tmp_path / "model", SynthSpec(family="deepseek_v3", experts=8, layers=2))
    write_dense_twin(tmp_path / "model", tmp_path / "twin")
    dense = load_file(tmp_path / "twin" / "model.safetensors")
    assert {tensor.dtype for tensor in dense.values()} == {torch.float32}
    assert not [n for n in dense if n.rpartition(".")[2] in ("trellis", "suh", "svh", "mcg")]
    config = json.loads((tmp_path / "twin" / "config.json").read_text())
    assert "quantization_config" not in config
    assert dense["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (256, 256)
