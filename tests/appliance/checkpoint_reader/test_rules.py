"""EXL3's rules: what a linear, an expert and a layer must have, and what config.json may say."""

from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint as tiny

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.errors import CheckpointError

E1 = "model.layers.1.mlp.experts.1"
GATE = f"{E1}.gate_proj"


def read(model: tiny.Model, folder: Path) -> Checkpoint:
    return read_checkpoint(model.write(folder))


def refused(model: tiny.Model, folder: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(model, folder)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8, 1.5, 2.5, 3.5])
def test_k_is_read_from_the_shape(tmp_path: Path, bits: float) -> None:
    checkpoint = read(tiny.qwen(bits=bits, codebook="mul1"), tmp_path)
    assert checkpoint.layers[0].experts[0].down.bits == bits
    assert checkpoint.warnings == ()


@pytest.mark.parametrize("codebook", ["mcg", "3inst"])
def test_half_bits_need_mul1(tmp_path: Path, codebook: str) -> None:
    refused(tiny.qwen(bits=2.5, codebook=codebook), tmp_path, "which only the codebook mul1 has")


@pytest.mark.parametrize("codebook", ["mcg", "mul1", "3inst"])
def test_the_marker_selects_the_codebook(tmp_path: Path, codebook: str) -> None:
    checkpoint = read(tiny.qwen(codebook=codebook), tmp_path)
    assert {p.codebook for p in checkpoint.layers[1].experts[3].projections} == {codebook}


@pytest.mark.parametrize("width", [0, 12, 20, 136, 144])
def test_a_width_that_no_k_explains(tmp_path: Path, width: int) -> None:
    model = tiny.qwen()
    model.tensors[f"{GATE}.trellis"] = ("I16", (16, 8, width))
    refused(model, tmp_path, f"{GATE} in .*the trellis is {width} wide")


@pytest.mark.parametrize(
    ("part", "stored", "words"),
    [
        ("trellis", ("F16", (16, 8, 48)), r"a trellis is I16 \[k/16, n/16, 16\*K\], not F16"),
        ("trellis", ("I16", (16, 384)), "not I16 .16, 384."),
        ("trellis", ("I16", (16, 9, 48)), "256 x 144; EXL3 needs multiples of 128"),
        ("trellis", ("I16", (17, 8, 48)), "272 x 128; EXL3 needs multiples of 128"),
        ("trellis", ("I16", (0, 8, 48)), "0 x 128; EXL3 needs multiples of 128"),
        ("suh", ("F16", (128,)), r"suh must be F16 \[256\], not F16 \[128\]"),
        ("svh", ("BF16", (128,)), r"svh must be F16 \[128\], not BF16"),
        ("mcg", ("I32", (1,)), r"the marker mcg must be I32 \[\], not I32 \[1\]"),
        ("mul1", ("I32", ()), "both codebook markers"),
        ("su", ("I16", (16,)), "has both suh and the older su"),
        ("weight", ("BF16", (128, 256)), "has a trellis and weight: two weights for one"),
        ("bias", ("F16", (64,)), r"the bias must be F16 \[128\]"),
    ],
)
def test_a_part_of_the_wrong_kind(tmp_path: Path, part: str, stored: Any, words: str) -> None:
    model = tiny.qwen()
    model.tensors[f"{GATE}.{part}"] = stored
    refused(model, tmp_path, f"{GATE} in model-.*{words}")


@pytest.mark.parametrize(
    ("part", "words"),
    [("trellis", "mcg, suh, svh but no trellis"), ("suh", "has no suh"), ("svh", "has no svh")],
)
def test_a_part_that_is_missing(tmp_path: Path, part: str, words: str) -> None:
    model = tiny.qwen()
    del model.tensors[f"{GATE}.{part}"]
    refused(model, tmp_path, words)


@pytest.mark.parametrize("key", ["lm_head", "model.layers.0.self_attn.q_proj"])
def test_linears_outside_the_experts_are_checked_too(tmp_path: Path, key: str) -> None:
    model = tiny.qwen()
    del model.tensors[f"{key}.svh"]
    refused(model, tmp_path, f"{key} in .*has no svh")


def test_older_files_pack_the_signs_of_their_scales(tmp_path: Path) -> None:
    model = tiny.qwen(bits=3)
    for name in [name for name in model.tensors if name.endswith((".suh", ".svh"))]:
        _, (count,) = model.tensors.pop(name)
        model.tensors[name[:-1]] = ("I16", (count // 16,))
    checkpoint = read(model, tmp_path)
    gate = checkpoint.layers[0].experts[0].gate
    assert gate.size_bytes == 256 * 128 * 3 // 8 + (256 + 128) // 8 + 4
    assert gate.scale_bytes == 2 * (256 + 128)
    assert (
        sum(layer.size_bytes for layer in checkpoint.layers)
        + sum(part.size_bytes for part in checkpoint.dense)
        == checkpoint.size_bytes
    )


def test_a_bias_is_part_of_its_projection(tmp_path: Path) -> None:
    model = tiny.qwen()
    for e in range(4):
        model.tensors[f"model.layers.0.mlp.experts.{e}.up_proj.bias"] = ("F16", (128,))
    up = read(model, tmp_path).layers[0].experts[0].up
    assert up.bias
    assert up.size_bytes == 256 * 128 * 3 // 8 + 2 * (256 + 128) + 4 + 256


def test_one_expert_without_its_marker(tmp_path: Path) -> None:
    model = tiny.qwen()
    del model.config["quantization_config"]["codebook"]
    del model.tensors[f"{GATE}.mcg"]
    refused(model, tmp_path, f"{GATE} has no codebook marker; most experts of this layer have the")


def test_all_markers_missing_though_the_config_declares_one(tmp_path: Path) -> None:
    model = tiny.qwen(codebook="3inst")
    model.config["quantization_config"]["codebook"] = "mcg"
    refused(
        model, tmp_path, r"declares the codebook mcg; model.layers.0.mlp.experts.0.gate_proj has no"
    )


def test_a_codebook_nobody_knows(tmp_path: Path) -> None:
    model = tiny.qwen()
    model.config["quantization_config"]["codebook"] = "mcg2"
    refused(model, tmp_path, "codebook 'mcg2'; 3inst, mcg and mul1 are known")


@pytest.mark.parametrize("declared", [2.9, 3.02, 2.51, 3.49])
def test_bits_near_the_stored_widths_are_worth_a_warning(tmp_path: Path, declared: float) -> None:
    model = tiny.qwen(bits=3)
    model.config["quantization_config"]["bits"] = declared
    (warning,) = read(model, tmp_path).warnings
    assert warning == f"config.json declares {declared} bits; the shapes say K = 3, and they count"


@pytest.mark.parametrize("declared", [2, 2.51, 3.0])
def test_bits_between_the_stored_widths_are_true(tmp_path: Path, declared: float) -> None:
    model = tiny.qwen(bits=3)
    model.tensors |= tiny.linear("model.layers.0.self_attn.q_proj", 256, 256, 2)
    model.config["quantization_config"]["bits"] = declared
    assert read(model, tmp_path).warnings == ()


@pytest.mark.parametrize("declared", [2, 2.5, 3.5, 4.0, 6, float("nan"), float("inf"), -3])
def test_bits_that_no_shape_explains(tmp_path: Path, declared: float) -> None:
    model = tiny.qwen(bits=3)
    model.config["quantization_config"]["bits"] = declared
    refused(model, tmp_path, f"declares {declared} bits; the shapes say K = 3")


def test_draft_experts_have_widths_of_their_own(tmp_path: Path) -> None:
    model = tiny.deepseek()
    for e in range(2):
        model.tensors |= tiny.expert(f"mtp.0.ffn.experts.{e}", 256, 128, ("w1", "w3", "w2"), 6)
    model.config["quantization_config"]["bits"] = 6
    refused(model, tmp_path, "declares 6 bits; the shapes say K = 3")


def test_bits_that_are_no_number(tmp_path: Path) -> None:
    model = tiny.qwen()
    model.config["quantization_config"]["bits"] = "3"
    refused(model, tmp_path, "bits = '3'; a number is needed")


def test_mixed_widths_are_represented_and_named(tmp_path: Path) -> None:
    model = tiny.qwen(layers=3)
    for layer in (0, 2):
        words = ("gate_proj", "up_proj", "down_proj")
        model.tensors |= tiny.expert(f"model.layers.{layer}.mlp.experts.3", 256, 128, words, 2)
    checkpoint = read(model, tmp_path)
    assert [e.gate.bits for e in checkpoint.layers[2].experts] == [3, 3, 3, 2]
    assert [e.gate.bits for e in checkpoint.layers[1].experts] == [3, 3, 3, 3]
    assert "experts of layers 0, 2 mix 2 and 3 bits in down_proj" in checkpoint.warnings


@pytest.mark.parametrize("method", ["fp8", "gptq"])
def test_exl3_tensors_under_another_quant_method(tmp_path: Path, method: str) -> None:
    model = tiny.qwen()
    model.config["quantization_config"]["quant_method"] = method
    refused(model, tmp_path, f"quant_method '{method}', but the tensors are EXL3")


def test_exl3_declared_and_no_trellis_anywhere(tmp_path: Path) -> None:
    model = tiny.qwen()
    for name in list(model.tensors):
        key, _, part = name.rpartition(".")
        if part in ("trellis", "suh", "svh", "mcg"):
            del model.tensors[name]
            model.tensors[f"{key}.weight"] = ("BF16", (128, 256))
    refused(model, tmp_path, "quant_method exl3, but no tensor is EXL3")


def drop(model: tiny.Model, prefix: str) -> None:
    for name in [name for name in model.tensors if name.startswith(prefix)]:
        del model.tensors[name]


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        (f"{E1}.", "has 3 experts, config.json says 4: expert 1 is missing"),
        (f"{E1}.down_proj.", f"{E1} has no down_proj, unlike expert 0"),
        ("model.layers.1.mlp.experts.", "layer 1 has no routed experts"),
        ("model.layers.1.", "layer 1 of 2 has no tensors at all"),
        ("model.layers.", "no tensor's name has a layer"),
    ],
)
def test_experts_and_layers_that_are_missing(tmp_path: Path, prefix: str, words: str) -> None:
    model = tiny.qwen()
    drop(model, prefix)
    refused(model, tmp_path, words)


def test_a_projection_that_no_expert_has(tmp_path: Path) -> None:
    model = tiny.qwen()
    for name in [name for name in model.tensors if ".experts." in name and ".up_proj." in name]:
        del model.tensors[name]
    refused(model, tmp_path, r"experts.0 has no up projection \(up_proj or w3\)")


def test_a_router_without_experts_gives_a_lost_layer_away(tmp_path: Path) -> None:
    model = tiny.qwen()
    del model.config["decoder_sparse_step"], model.config["mlp_only_layers"]
    drop(model, "model.layers.1.mlp.experts.")
    refused(model, tmp_path, "layer 1 has no routed experts; by config.json and routers 2 of 2")


@pytest.mark.parametrize(("says", "words"), [(3, "config.json says 3"), (5, "expert 4 is missing")])
def test_an_expert_count_unlike_the_configs(tmp_path: Path, says: int, words: str) -> None:
    model = tiny.qwen(experts=4)
    model.config["num_experts"] = says
    refused(model, tmp_path, f"has 4 experts.*{words}")


def test_experts_where_the_config_says_dense(tmp_path: Path) -> None:
    model = tiny.qwen()
    model.config["mlp_only_layers"] = [1]
    refused(model, tmp_path, "layer 1 has routed experts; config.json says that it is dense")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "hidden_size",
            512,
            "gate projection is 256 x 128 by its trellis, and 512 x 128 by config",
        ),
        ("moe_intermediate_size", 256, "256 x 128 by its trellis, and 256 x 256 by config"),
    ],
)
def test_sizes_unlike_the_configs(tmp_path: Path, key: str, value: int, words: str) -> None:
    model = tiny.qwen()
    model.config[key] = value
    refused(model, tmp_path, words)


def test_two_sets_of_experts_for_one_layer(tmp_path: Path) -> None:
    model = tiny.qwen()
    model.tensors |= tiny.expert(
        "layers.1.mlp.experts.0", 256, 128, ("gate_proj", "up_proj", "down_proj")
    )
    refused(model, tmp_path, "layer 1 has two sets of experts")


def test_an_unknown_projection_is_refused(tmp_path: Path) -> None:
    model = tiny.qwen()
    model.tensors |= tiny.linear("model.layers.0.mlp.experts.0.side_proj", 256, 128)
    refused(model, tmp_path, "has the projection side_proj; gate, up and down are expected")


def test_layers_beyond_the_config_count_as_draft(tmp_path: Path) -> None:
    model = tiny.qwen(layers=3)
    model.config["num_hidden_layers"] = 2
    checkpoint = read(model, tmp_path)
    assert [layer.draft for layer in checkpoint.layers] == [False, False, True]
    assert checkpoint.warnings == (
        "layers 2 to 2 are beyond the 2 layers and 0 draft layers of config.json; they count as "
        "draft layers",
    )


def test_a_config_with_experts_and_no_expert_stored(tmp_path: Path) -> None:
    model = tiny.qwen()
    del model.config["decoder_sparse_step"], model.config["mlp_only_layers"]
    for layer in range(2):
        drop(model, f"model.layers.{layer}.mlp.")
    refused(model, tmp_path, "config.json says 4 routed experts a layer; none is stored")


@pytest.mark.parametrize("name", ["experts.gate_up_proj", "experts.0.up_proj.weight"])
def test_experts_of_a_model_whose_config_has_none(tmp_path: Path, name: str) -> None:
    model = tiny.qwen()
    for layer in range(2):
        drop(model, f"model.layers.{layer}.mlp.")
    del model.config["num_experts"]
    model.tensors[f"model.layers.1.mlp.{name}"] = ("BF16", (4, 256))
    refused(model, tmp_path, "config.json says (there are none|0)")
