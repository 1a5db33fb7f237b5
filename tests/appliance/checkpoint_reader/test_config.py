"""config.json across families: counts, top-k, and which layers have experts."""

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.checkpoint.config import read_architecture
from appliance.errors import CheckpointError

SMALL = {"num_hidden_layers": 4, "hidden_size": 256, "moe_intermediate_size": 128}
MOE = SMALL | {"num_experts": 8, "num_experts_per_tok": 2}


def moe_layers(**fields: Any) -> list[int] | None:
    found = read_architecture(MOE | fields).moe_layers
    return None if found is None else sorted(found)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"first_k_dense_replace": 1}, [1, 2, 3]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2]),
        ({"moe_layer_freq": [0, 1, 0, 1]}, [1, 3]),
        ({"moe_layer_freq": [0, 1, 0, 1, 1]}, [1, 3]),
        ({"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, [2, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, [0, 1, 2, 3]),
        ({}, None),
    ],
)
def test_each_familys_rule_for_layers_with_experts(fields: Any, layers: list[int] | None) -> None:
    assert moe_layers(**fields) == layers


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers or n_layers"),
        ({"num_hidden_layers": 0}, "0 layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"num_hidden_layers": True}, "a whole number is needed"),
        ({"hidden_size": "256"}, "hidden_size = '256'; a whole number"),
        ({"num_experts": -1}, "num_experts = -1"),
        ({"num_experts": 10**12}, "num_experts = 1000000000000"),
        ({"num_experts_per_tok": 9}, "8 routed experts and picks 9"),
        ({"num_experts_per_tok": None}, "8 routed experts and picks 0"),
        ({"moe_layer_freq": [0, 1]}, "2 entries in moe_layer_freq for 4 layers"),
        ({"moe_layer_freq": 0}, "every 0 layers"),
        ({"moe_layer_freq": ["x"] * 4}, "a list of numbers is needed"),
        ({"mlp_only_layers": "none"}, "a list of numbers is needed"),
        ({"quantization_config": "exl3"}, "quantization_config that is not an object"),
    ],
)
def test_a_config_that_makes_no_sense(fields: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_architecture(MOE | fields)


def test_a_nested_text_config_wins() -> None:
    config = {
        "model_type": "outer",
        "hidden_size": 1,
        "text_config": MOE,
        "quantization_config": {},
    }
    architecture = read_architecture(config)
    assert (architecture.model_type, architecture.hidden_size) == ("outer", 256)


def test_a_dense_model_has_no_experts() -> None:
    architecture = read_architecture(SMALL)
    assert (architecture.experts, architecture.moe_layers) == (0, frozenset())


# The identity fields, whole or cut, of real configs; LOG.md section 5 has the right answers.


def real(shared: Path, name: str) -> Any:
    return json.loads((shared / "cases" / "ckpt" / name).read_text())


@pytest.mark.shared
def test_c001_deepseek_v2_lite_has_26_moe_layers_of_64(shared: Path) -> None:
    a = read_architecture(real(shared, "C001_config_deepseek_v2_lite.json"))
    assert a.moe_layers == frozenset(range(1, 27))
    assert (a.experts, a.top_k, a.shared_experts, a.family) == (64, 6, 2, "deepseek")


@pytest.mark.shared
def test_c002_deepseek_v41_reads_its_text_config_and_its_drafts(shared: Path) -> None:
    a = read_architecture(real(shared, "C002_config_deepseek_v41_flash_text_fields.json"))
    assert (a.hidden_layers, a.experts, a.top_k, a.shared_experts) == (40, 384, 6, 1)
    assert (a.hidden_size, a.intermediate_size) == (5120, 2304)
    assert (a.draft_layers, a.draft_experts, a.draft_top_k) == (3, 128, 3)
    assert (a.engram_layers, a.table_values) == ((1, 14), 256)
    assert (a.family, a.model_type) == ("deepseek_v4", "deepseek_v41")


@pytest.mark.shared
def test_c005_glm45_has_89_moe_layers_and_a_draft(shared: Path) -> None:
    a = read_architecture(real(shared, "C005_config_glm45_moe.json"))
    assert a.moe_layers == frozenset(range(3, 92))
    assert (a.experts, a.top_k, a.draft_layers, a.draft_experts) == (160, 8, 1, 160)


@pytest.mark.shared
def test_c007_mimo_lists_its_moe_layers_and_leaves_a_scale_null(shared: Path) -> None:
    a = read_architecture(real(shared, "C007_config_mimo_v26_pro_layer_pattern.json"))
    assert (a.moe_layers, a.experts, a.top_k) == (frozenset({1}), 384, 8)


@pytest.mark.shared
def test_c008_null_shared_experts_are_none(shared: Path) -> None:
    configs = real(shared, "C008_config_ids_three_families.json")
    cut = {"num_hidden_layers": 2, "num_experts_per_tok": 8}
    read = {name: read_architecture(config | cut) for name, config in configs.items()}
    assert {name: (a.experts, a.shared_experts, a.family) for name, a in read.items()} == {
        "deepseek_v3": (256, 1, "deepseek"),
        "qwen-235B": (128, 0, "qwen"),
        "kimi-k2": (384, 1, "kimi"),
    }
