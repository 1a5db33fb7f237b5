"""Forms other than one EXL3 tensor set an expert: other formats, fused, sliced by rank, tables."""

from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint as tiny

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.checkpoint.support import require_exl3, require_tensor_parallel
from appliance.errors import CheckpointError, UnsupportedError

Stored = dict[str, tiny.Stored]


def with_experts(model: tiny.Model, make: Any, layers: range | None = None) -> tiny.Model:
    """The model with the experts of these layers (all) replaced by what `make(prefix)` gives."""
    for layer in layers or range(model.config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        for name in [name for name in model.tensors if name.startswith(prefix)]:
            del model.tensors[name]
        model.tensors |= make(prefix)
    return model


def plain(dtype: str) -> Any:
    def make(prefix: str) -> Stored:
        return {
            f"{prefix}.{e}.{word}.weight": (dtype, (128, 256))
            for e in range(4)
            for word in ("gate_proj", "up_proj", "down_proj")
        }

    return make


def bytes_of(checkpoint: Checkpoint, role: str) -> int:
    return sum(part.size_bytes for part in checkpoint.dense if part.role == role)


def total(checkpoint: Checkpoint) -> int:
    parts = (*checkpoint.layers, *checkpoint.tables, *checkpoint.dense)
    return sum(part.size_bytes for part in parts)


@pytest.mark.parametrize(
    ("dtype", "quantization", "name"),
    [
        ("BF16", None, "bf16"),
        ("F8_E4M3", {"quant_method": "fp8"}, "fp8"),
        ("U8", {"quant_method": "fp8", "expert_dtype": "fp4"}, "fp4"),
        ("I32", {"quant_method": "gptq"}, "gptq"),
    ],
)
def test_experts_in_another_format_are_sized_and_named(
    tmp_path: Path, dtype: str, quantization: Any, name: str
) -> None:
    model = with_experts(tiny.qwen(), plain(dtype))
    model.config["quantization_config"] = quantization
    for key in [key for key in model.tensors if key.endswith((".trellis", ".suh", ".svh", ".mcg"))]:
        del model.tensors[key]
    checkpoint = read_checkpoint(model.write(tmp_path))
    assert (checkpoint.quantisation, checkpoint.layers) == (name, ())
    assert bytes_of(checkpoint, "routed_experts") == 2 * 4 * 3 * 128 * 256 * tiny.BITS[dtype] // 8
    assert total(checkpoint) == checkpoint.size_bytes
    with pytest.raises(UnsupportedError, match=f"routed experts are stored as {name}, not as EXL3"):
        require_exl3(checkpoint)


def test_fused_experts_are_sized_and_named(tmp_path: Path) -> None:
    def fused(prefix: str) -> Stored:
        return {
            f"{prefix}.gate_up_proj": ("BF16", (4, 256, 256)),
            f"{prefix}.down_proj": ("BF16", (4, 128, 256)),
        }

    model = with_experts(tiny.qwen(), fused)
    checkpoint = read_checkpoint(model.write(tmp_path))
    assert checkpoint.quantisation == "bf16"
    assert bytes_of(checkpoint, "routed_experts") == 2 * 2 * 4 * (256 + 128) * 256


def test_fused_exl3_experts_are_refused_with_the_reason(tmp_path: Path) -> None:
    def fused(prefix: str) -> Stored:
        return {f"{prefix}.gate_up_proj.trellis": ("I16", (4, 16, 16, 48))}

    checkpoint = read_checkpoint(with_experts(tiny.qwen(), fused).write(tmp_path))
    assert checkpoint.quantisation == "exl3-fused"
    with pytest.raises(UnsupportedError, match="fused; each needs tensors of its own"):
        require_exl3(checkpoint)


def test_layers_in_different_formats_are_mixed(tmp_path: Path) -> None:
    model = with_experts(tiny.qwen(), plain("BF16"), range(1, 2))
    checkpoint = read_checkpoint(model.write(tmp_path))
    assert checkpoint.quantisation == "mixed"
    assert [layer.index for layer in checkpoint.layers] == [0]
    with pytest.raises(UnsupportedError, match="only some of its layers have EXL3 experts"):
        require_exl3(checkpoint)


def test_one_expert_in_another_format_is_an_error(tmp_path: Path) -> None:
    model = tiny.qwen()
    prefix = "model.layers.0.mlp.experts.2.up_proj"
    for name in [name for name in model.tensors if name.startswith(prefix)]:
        del model.tensors[name]
    model.tensors[f"{prefix}.weight"] = ("BF16", (128, 256))
    with pytest.raises(CheckpointError, match=f"{prefix} in .* has weight but no trellis"):
        read_checkpoint(model.write(tmp_path))


def test_draft_experts_in_another_format_count_as_draft(tmp_path: Path) -> None:
    model = tiny.deepseek()
    before = bytes_of(read_checkpoint(model.write(tmp_path / "a")), "draft")
    for name in [name for name in model.tensors if name.startswith("mtp.0.ffn.experts.")]:
        del model.tensors[name]
    for e in range(2):
        for word in ("w1", "w2", "w3"):
            model.tensors[f"mtp.0.ffn.experts.{e}.{word}.weight"] = ("U8", (128, 128))
    checkpoint = read_checkpoint(model.write(tmp_path / "b"))
    assert checkpoint.quantisation == "exl3"
    assert bytes_of(checkpoint, "draft") == before + 2 * 3 * 128 * 128
    require_exl3(checkpoint)


def test_a_model_without_routed_experts_says_so(tmp_path: Path) -> None:
    model = with_experts(tiny.qwen(), lambda prefix: {})
    del model.config["num_experts"]
    for layer in range(2):
        del model.tensors[f"model.layers.{layer}.mlp.gate.weight"]
        model.tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = ("BF16", (512, 256))
    checkpoint = read_checkpoint(model.write(tmp_path))
    assert checkpoint.quantisation == "none"
    assert bytes_of(checkpoint, "mlp") == 2 * 2 * 512 * 256
    with pytest.raises(UnsupportedError, match="no routed experts"):
        require_exl3(checkpoint)


def sliced(ranks: int) -> tiny.Model:
    def make(prefix: str) -> Stored:
        out: Stored = {}
        for e in range(4):
            for rank in range(ranks):
                out |= tiny.linear(f"{prefix}.{e}.gate_proj.rank{rank}", 256, 128)
                out |= tiny.linear(f"{prefix}.{e}.up_proj.rank{rank}", 256, 128)
                out |= tiny.linear(f"{prefix}.{e}.down_proj.rank{rank}", 128, 256)
        return out

    model = with_experts(tiny.qwen(), make)
    model.config["moe_intermediate_size"] = 128 * ranks
    return model


def test_rank_slices_add_up_to_whole_experts(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(sliced(2).write(tmp_path))
    assert (checkpoint.rank_sliced, checkpoint.intermediate_size) == (2, 256)
    expert = checkpoint.layers[0].experts[0]
    assert [(p.k, p.n) for p in expert.projections] == [(256, 256), (256, 256), (256, 256)]
    assert expert.trellis_bytes == 3 * 256 * 256 * 3 // 8
    # Each slice stores its own scales of both sides and its own marker.
    assert expert.size_bytes == expert.trellis_bytes + 3 * 2 * (2 * (256 + 128) + 4)
    assert total(checkpoint) == checkpoint.size_bytes


def test_rank_slices_serve_only_their_own_degree(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(sliced(2).write(tmp_path))
    require_tensor_parallel(checkpoint, 2)
    with pytest.raises(UnsupportedError, match="sliced for tensor parallelism 2, not 1"):
        require_tensor_parallel(checkpoint, 1)


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        ("gate_proj.rank0.", "has the slices of ranks .1.; 1 slices are numbered 0 to 0"),
        ("gate_proj.rank1.", "gate projection is 256 x 128 by its trellis, and 256 x 256"),
    ],
)
def test_a_rank_slice_that_is_missing(tmp_path: Path, drop: str, words: str) -> None:
    model = sliced(2)
    for name in [name for name in model.tensors if f"layers.1.mlp.experts.2.{drop}" in name]:
        del model.tensors[name]
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(model.write(tmp_path))


def test_slices_of_unequal_width_are_refused(tmp_path: Path) -> None:
    model = sliced(2)
    model.tensors |= tiny.linear("model.layers.0.mlp.experts.0.up_proj.rank1", 256, 128, 4)
    with pytest.raises(CheckpointError, match=r"experts.0.up_proj is cut into unequal slices"):
        read_checkpoint(model.write(tmp_path))


def test_layers_sliced_for_different_degrees_are_refused(tmp_path: Path) -> None:
    model = sliced(2)
    for name in [name for name in model.tensors if "layers.1.mlp.experts." in name]:
        del model.tensors[name]
    for e in range(4):
        at = f"model.layers.1.mlp.experts.{e}"
        model.tensors |= tiny.expert(at, 256, 256, ("gate_proj", "up_proj", "down_proj"))
    with pytest.raises(CheckpointError, match=r"different tensor-parallel degrees .*: 1, 2"):
        read_checkpoint(model.write(tmp_path))


def test_whole_and_sliced_do_not_mix(tmp_path: Path) -> None:
    model = sliced(2)
    model.tensors |= tiny.linear("model.layers.0.mlp.experts.0.up_proj", 256, 256)
    with pytest.raises(CheckpointError, match="stored whole and also sliced by rank"):
        read_checkpoint(model.write(tmp_path))


def test_an_int4_engram_table_has_144_byte_rows(tmp_path: Path) -> None:
    model = tiny.deepseek()
    model.tensors["layers.1.engram.embed.weight"] = ("U8", (1000, 128))
    model.tensors["layers.1.engram.embed.scale"] = ("F16", (1000, 8))
    (table,) = read_checkpoint(model.write(tmp_path)).tables
    assert (table.rows, table.row_bytes, table.format) == (1000, 144, "int4")


def test_an_n_gram_table_in_shards_is_one_table(tmp_path: Path) -> None:
    model = tiny.qwen()
    at = "model.layers.0.ple.ple_embedding.ngram_embedding"
    for shard, rows in enumerate((128, 128, 64)):
        model.tensors[f"{at}.shard_{shard}.weight"] = ("F8_E4M3", (rows, 160))
    model.tensors[f"{at}.weight_scale"] = ("F32", ())
    checkpoint = read_checkpoint(model.write(tmp_path))
    (table,) = checkpoint.tables
    assert (table.name, table.layer, table.rows, table.row_bytes) == (at, 0, 320, 160)
    assert table.size_bytes == 320 * 160 + 4
    assert total(checkpoint) == checkpoint.size_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers.1.engram.embed.scale": ("F8_E8M0", (999, 8))}, "1000 rows and scales for 999"),
        ({"layers.1.engram.embed.weight": ("F8_E4M3", (256,))}, "must be .rows, columns."),
        ({"layers.1.engram.embed.weight": ("F8_E4M3", (0, 256))}, "must be .rows, columns."),
        ({"layers.1.engram.embed.weight": None}, "has no weight, only"),
        (
            {"layers.1.engram.embed.weight": None, "layers.1.engram.embed.scale": None},
            "an Engram table at layer 1",
        ),
    ],
)
def test_a_table_that_does_not_add_up(tmp_path: Path, changes: Any, words: str) -> None:
    model = tiny.deepseek()
    for name, stored in changes.items():
        if stored is None:
            del model.tensors[name]
        else:
            model.tensors[name] = stored
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(model.write(tmp_path))


@pytest.mark.parametrize(("ranks", "slice_"), [(2, "64"), (3, "42.6667"), (4, "32")])
def test_b036_shards_that_are_no_multiple_of_128_are_refused(
    tmp_path: Path, ranks: int, slice_: str
) -> None:
    checkpoint = read_checkpoint(tiny.qwen().write(tmp_path))
    require_tensor_parallel(checkpoint, 1)
    words = f"128 cut for {ranks} ranks are {slice_} wide, no multiple of 128"
    with pytest.raises(UnsupportedError, match=words) as caught:
        require_tensor_parallel(checkpoint, ranks)
    assert caught.value.fix == "tensor parallelism 1, or expert parallelism"


def test_sizes_that_no_degree_fits_are_refused_without_a_suggestion(tmp_path: Path) -> None:
    model = with_experts(tiny.qwen(), plain("BF16"))
    model.config["moe_intermediate_size"] = 2880
    checkpoint = read_checkpoint(model.write(tmp_path))
    with pytest.raises(UnsupportedError, match="2880 cut for 1 ranks") as caught:
        require_tensor_parallel(checkpoint, 1)
    assert caught.value.fix is None
