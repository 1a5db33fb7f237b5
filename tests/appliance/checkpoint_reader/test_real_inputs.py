"""Checkpoints built from real names, shapes and config blocks (LOG.md section 5: right answers)."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint as tiny

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.linears import Linears
from appliance.checkpoint.model import Checkpoint, Tensor
from appliance.checkpoint.support import require_exl3
from appliance.errors import CheckpointError, UnsupportedError

pytestmark = pytest.mark.shared
HF_WORDS = ("gate_proj", "up_proj", "down_proj")
NATIVE_WORDS = ("w1", "w3", "w2")


@pytest.fixture
def ckpt(shared: Path) -> Path:
    return shared / "cases" / "ckpt"


def bytes_by_role(checkpoint: Checkpoint) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in checkpoint.dense:
        sizes[part.role] = sizes.get(part.role, 0) + part.size_bytes
    return sizes


def deepseek_v41_shards() -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Routed experts, draft experts and tables, a shard a layer: 188,932 tensors."""
    for first, count, layers in (("layers.0.", 384, 40), ("mtp.0.", 128, 3)):
        tensors: dict[str, tiny.Stored] = {}
        for e in range(count):
            tensors |= tiny.expert(f"{first}ffn.experts.{e}", 5120, 2304, NATIVE_WORDS)
        header, size = tiny.header_of(tensors)
        text = json.dumps(header)
        for layer in range(layers):
            named = text.replace(first, first.replace("0", str(layer)))
            yield f"{first}{layer}.safetensors", (named.encode(), size)
    tables: dict[str, tiny.Stored] = {}
    for layer in (1, 14):
        tables[f"layers.{layer}.engram.embed.weight"] = ("U8", (384_000_000, 128))
        tables[f"layers.{layer}.engram.embed.scale"] = ("F16", (384_000_000, 8))
    header, size = tiny.header_of(tables)
    yield "tables.safetensors", (json.dumps(header).encode(), size)


def test_c002_all_of_deepseek_v41_is_read_from_headers_in_seconds(
    ckpt: Path, tmp_path: Path
) -> None:
    """15,360 = 40 x 384 experts of 13,315,596 bytes, 190.48 GiB; draft experts are apart."""
    config = json.loads((ckpt / "C002_config_deepseek_v41_flash_text_fields.json").read_text())
    config["quantization_config"] = {"quant_method": "exl3", "bits": 2.9, "codebook": "mcg"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file, tensors in deepseek_v41_shards():
        tiny.write_raw(tmp_path / file, *tensors)
    start = time.process_time()
    checkpoint = read_checkpoint(tmp_path)
    assert time.process_time() - start < 5  # 2.0 s where it was written; quadratic would be hours
    assert checkpoint.expert_count == 15_360
    assert {e.size_bytes for layer in checkpoint.layers for e in layer.experts} == {13_315_596}
    target_bytes = sum(layer.size_bytes for layer in checkpoint.target_layers)
    assert f"{target_bytes / 2**30:.2f}" == "190.48"
    drafts = [(layer.index, len(layer.experts), layer.top_k) for layer in checkpoint.layers[40:]]
    assert drafts == [(40, 128, 3), (41, 128, 3), (42, 128, 3)]
    assert sum(table.size_bytes for table in checkpoint.tables) == 2 * 384_000_000 * 144
    assert [table.format for table in checkpoint.tables] == ["int4", "int4"]
    assert checkpoint.warnings == (
        "config.json declares 2.9 bits; the shapes say K = 3, and they count",
    )


@pytest.mark.parametrize("block", [0, 1])
def test_c010_only_the_routed_experts_of_glm_are_exl3(
    ckpt: Path, tmp_path: Path, block: int
) -> None:
    quantization = json.loads((ckpt / "C010_qcfg_exl3_glm53_routed_only.json").read_text())[block]
    bits = quantization["bits"]
    model = tiny.Model(
        {
            "model_type": "glm4_moe", "num_hidden_layers": 5, "first_k_dense_replace": 3,
            "hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "quantization_config": quantization,
        },
        {"lm_head.weight": ("BF16", (1024, 256))},
    )  # fmt: skip
    for layer in range(5):
        at = f"model.layers.{layer}"
        model.tensors[f"{at}.self_attn.q_proj.weight"] = ("BF16", (256, 256))
        if layer < 3:
            model.tensors[f"{at}.mlp.gate_proj.weight"] = ("BF16", (512, 256))
        else:
            for e in range(4):
                model.tensors |= tiny.expert(f"{at}.mlp.experts.{e}", 256, 128, HF_WORDS, bits)
    checkpoint = read_checkpoint(model.write(tmp_path))
    require_exl3(checkpoint)
    assert [layer.index for layer in checkpoint.layers] == [3, 4]
    assert {e.up.bits for layer in checkpoint.layers for e in layer.experts} == {bits}
    assert checkpoint.warnings == ()
    stored = {name.removesuffix(".trellis") for name in model.tensors if name.endswith(".trellis")}
    for pattern in quantization.get("module_include", ()):
        keys = {name.rpartition(".")[0] for name in model.tensors}
        assert {key for key in keys if re.search(pattern, key)} == stored


@pytest.mark.parametrize("block", range(6))
def test_c011_sizes_come_from_shapes_whatever_the_block_declares(
    ckpt: Path, tmp_path: Path, block: int
) -> None:
    quantization = json.loads((ckpt / "C011_qcfg_exl3_variants.json").read_text())[block]
    codebook = quantization.get("codebook", "3inst")
    model = tiny.qwen(bits=round(quantization["bits"]), codebook=codebook)
    model.config["quantization_config"] = quantization
    if "head_bits" not in quantization:
        for part in ("trellis", "suh", "svh", codebook):
            model.tensors.pop(f"lm_head.{part}", None)
        model.tensors["lm_head.weight"] = ("BF16", (1024, 256))
    checkpoint = read_checkpoint(model.write(tmp_path))
    shape = checkpoint.layers[0].experts[0].gate
    assert (shape.bits, shape.codebook) == (round(quantization["bits"]), codebook)
    assert shape.trellis_bytes == 256 * 128 * round(quantization["bits"]) // 8
    head = bytes_by_role(checkpoint)["head"]
    marker = 0 if codebook == "3inst" else 4
    exl3_head = 256 * 1024 * 6 // 8 + 2 * (256 + 1024) + marker
    assert head == (exl3_head if "head_bits" in quantization else 2 * 1024 * 256)


def test_c012_shapes_of_real_repositories(ckpt: Path) -> None:
    header = json.loads((ckpt / "C012_exl3_header_shapes_real.json").read_text())
    sizes = {}
    for name, entry in header.items():
        key, _, part = name.rpartition(".")
        if part != "trellis" or key == "<key>":
            continue
        shape = tuple(entry["shape"])
        k, n = 16 * shape[0], 16 * shape[1]
        parts = {
            part: Tensor(f"{key}.{part}", dtype, dims, "m", 0, size)
            for part, dtype, dims, size in (
                ("trellis", entry["dtype"], shape, 2 * shape[0] * shape[1] * shape[2]),
                ("suh", header["<key>.suh"]["dtype"], (k,), 2 * k),
                ("svh", header["<key>.svh"]["dtype"], (n,), 2 * n),
                ("mcg", header["<key>.mcg"]["dtype"], tuple(header["<key>.mcg"]["shape"]), 4),
            )
        }
        read = Linears().read(key, parts)
        assert read.stored_bytes is None  # the formula is the disk
        sizes[key.rpartition(".")[2]] = (read.k, read.n, read.bits)
    assert sizes == {
        "q_proj": (2048, 2048, 3), "k_proj": (2048, 512, 3), "down_proj": (8192, 2048, 3),
        "lm_head": (2048, 128256, 6),
    }  # fmt: skip


def test_c014_ranks_are_stripped_and_a_tp2_checkpoint_says_so(ckpt: Path, tmp_path: Path) -> None:
    names = (ckpt / "C014_exl3_rank_sliced_names.txt").read_text().split()
    assert all(re.search(r"\.rank[01]\.trellis$", name) for name in names[:3])
    model = tiny.Model(
        {
            "model_type": "glm4_moe", "num_hidden_layers": 78, "hidden_size": 256,
            "moe_intermediate_size": 256, "n_routed_experts": 2, "num_experts_per_tok": 1,
            "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "exl3"},
            "moe_layer_freq": [int(layer == 3) for layer in range(78)],
        },
        {names[3]: ("BF16", (64, 256))},
    )  # fmt: skip
    for layer in range(78):
        model.tensors[f"layers.{layer}.input_layernorm.weight"] = ("BF16", (256,))
    banks = {re.sub(r"\.experts\..*", ".experts", name) for name in names[:3]}
    for prefix in banks:
        for e in range(2):
            for rank in range(2):
                for word, k, n in zip(HF_WORDS, (256, 256, 128), (128, 128, 256), strict=True):
                    model.tensors |= tiny.linear(f"{prefix}.{e}.{word}.rank{rank}", k, n)
    assert set(names) <= model.tensors.keys()
    checkpoint = read_checkpoint(model.write(tmp_path))
    assert checkpoint.rank_sliced == 2
    assert [(layer.prefix, layer.draft) for layer in checkpoint.layers] == [
        ("layers.3.mlp.experts", False), ("model.layers.78.mlp.experts", True),
    ]  # fmt: skip


def test_c015_the_official_deepseek_release_is_sized_by_role(ckpt: Path, tmp_path: Path) -> None:
    config = json.loads((ckpt / "C002_config_deepseek_v41_flash_text_fields.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 3, "engram_layer_ids": [1]}
    config["text_config"] |= {"n_routed_experts": 1, "num_experts_per_tok": 1}
    names = (ckpt / "C015_names_dsv41_native.txt").read_text().split()
    model = tiny.Model(config, dict.fromkeys(names, ("F8_E4M3", (4, 8))))
    for layer in (1, 2):
        model.tensors[f"layers.{layer}.ffn.experts.0.w1.weight"] = ("U8", (4, 8))
    model.tensors["layers.1.engram.embed.weight"] = ("F8_E4M3", (10, 256))
    model.tensors["layers.1.engram.embed.scale"] = ("F8_E8M0", (10, 8))
    checkpoint = read_checkpoint(model.write(tmp_path))
    assert checkpoint.quantisation == "fp4"
    with pytest.raises(UnsupportedError, match="stored as fp4, not as EXL3"):
        require_exl3(checkpoint)
    sizes = bytes_by_role(checkpoint)
    assert sizes["routed_experts"] == 3 * 32
    assert sizes["shared_experts"] == 3 * 32
    assert sizes["router"] == 3 * 32
    assert sizes["draft"] == 32
    assert sizes["vision"] == 5 * 32  # image_*, vision.* and aligner.*
    assert checkpoint.tables[0].row_bytes == 264
    assert sum(sizes.values()) + 2640 == checkpoint.size_bytes


def test_c016_fused_experts_of_gpt_oss_over_shards_counted_by_the_map(
    ckpt: Path, tmp_path: Path
) -> None:
    index = json.loads((ckpt / "C016_index_gpt_oss_20b_trimmed.json").read_text())
    weight_map: dict[str, str] = index["weight_map"]
    # The excerpt leaves layers out: give them the names of layer 0, in the third file.
    third = "model-00002-of-00002.safetensors"
    for layer in range(19):
        for name in [name for name in weight_map if name.startswith("model.layers.0.")]:
            weight_map.setdefault(name.replace("layers.0.", f"layers.{layer}."), third)
    files = sorted(set(weight_map.values()))
    assert files == [f"model-0000{i}-of-00002.safetensors" for i in range(3)]
    assert len({f for name, f in weight_map.items() if name.startswith("model.layers.18.")}) == 3
    for file in files:
        names = [name for name, shard in weight_map.items() if shard == file]
        tiny.write_shard(tmp_path / file, dict.fromkeys(names, ("U8", (32, 16))))
    (tmp_path / tiny.INDEX).write_text(json.dumps(index))
    config: dict[str, Any] = {
        "model_type": "gpt_oss", "num_hidden_layers": 19, "hidden_size": 2880,
        "intermediate_size": 2880, "num_local_experts": 32, "experts_per_token": 4,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.quantisation, checkpoint.warnings) == ("mxfp4", ())
    assert bytes_by_role(checkpoint)["routed_experts"] == 19 * 6 * 32 * 16
    with pytest.raises(UnsupportedError, match="stored as mxfp4, not as EXL3"):
        require_exl3(checkpoint)


def test_c018_minimax_names_w1_is_gate_w3_is_up_w2_is_down(ckpt: Path, tmp_path: Path) -> None:
    names = (ckpt / "C018_names_minimax_block_sparse.txt").read_text().split()
    model = tiny.Model(
        {
            "model_type": "minimax_m2", "num_hidden_layers": 3, "hidden_size": 256,
            "intermediate_size": 128, "num_local_experts": 2, "num_experts_per_tok": 1,
            "quantization_config": {"quant_method": "exl3"},
        },
        {f"model.layers.{layer}.input_layernorm.weight": ("BF16", (256,)) for layer in (0, 1)},
    )  # fmt: skip
    for name in names:
        match = re.fullmatch(r"(.*\.experts\.\d)\.(w\d)\.weight", name)
        k, n = (128, 256) if match and match[2] == "w2" else (256, 128)
        stored = {name: ("BF16", (128, 256))}
        model.tensors |= tiny.linear(f"{match[1]}.{match[2]}", k, n) if match else stored
    checkpoint = read_checkpoint(model.write(tmp_path))
    (layer,) = checkpoint.layers
    assert (layer.index, len(layer.experts)) == (2, 2)
    assert layer.prefix == "model.layers.2.block_sparse_moe.experts"
    assert layer.projection_names == ("w1", "w3", "w2")
    sizes = bytes_by_role(checkpoint)
    assert sizes["shared_experts"] == 3 * 2 * 128 * 256
    assert sizes["router"] == 2 * 2 * 128 * 256


def test_c019_an_expert_has_all_its_parts_or_is_refused(ckpt: Path, tmp_path: Path) -> None:
    """The six names are what a peer offloads; in DESIGN.md only trellises move to the host."""
    text = (ckpt / "C019_exl3_uva_param_names.txt").read_text()
    names = re.findall(r"\b(w13|w2)_(\w+)", text)
    assert len(names) == 6
    for segment, part in names:
        model = tiny.deepseek()
        for word in {"w13": ("w1", "w3"), "w2": ("w2",)}[segment]:
            del model.tensors[f"layers.1.ffn.experts.2.{word}.{part}"]
        with pytest.raises(
            CheckpointError, match=rf"layers\.1\.ffn\.experts\.2\.w[123] in .* no {part}"
        ):
            read_checkpoint(model.write(tmp_path / f"{segment}_{part}"))
    expert = read_checkpoint(tiny.deepseek().write(tmp_path / "whole")).layers[0].experts[0]
    stays = sum(p.scale_bytes + p.marker_bytes for p in expert.projections)
    assert expert.size_bytes == expert.trellis_bytes + stays
    assert stays == 3 * 2 * (256 + 128) + 12
