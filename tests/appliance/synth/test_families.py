"""GLM-4.5, Mixtral and a thin DeepSeek-V4.1: names, shapes, and tables that say the same."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.synth import SynthSpec, synthesize, tokenizer, v41_thin
from appliance.errors import UsageError
from expert_kernels import lookup

pytestmark = pytest.mark.engine
THIN: dict[str, Any] = {"family": "deepseek_v41", "layers": 3, "dense_layers": 0, "experts": 4,
                        "top_k": 2}  # fmt: skip


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def test_mixtral_calls_its_experts_w1_w3_w2_in_every_layer(tmp_path: Path) -> None:
    synthesize(tmp_path / "m", SynthSpec(family="mixtral", dense_layers=0))
    read = read_checkpoint(tmp_path / "m")
    assert [layer.index for layer in read.target_layers] == [0, 1, 2, 3]
    assert read.target_layers[0].projection_names == ("w1", "w3", "w2")
    assert read.target_layers[0].prefix == "model.layers.0.block_sparse_moe.experts"
    assert config(tmp_path / "m")["intermediate_size"] == 256


def test_glm_has_biases_shared_experts_and_a_first_dense_layer(tmp_path: Path) -> None:
    synthesize(tmp_path / "m", SynthSpec(family="glm4_moe"))
    read, stored = read_checkpoint(tmp_path / "m"), tensors(tmp_path / "m")
    assert [layer.index for layer in read.target_layers] == [1, 2, 3]
    assert stored["model.layers.0.self_attn.q_proj.bias"].dtype == torch.float16
    assert "model.layers.1.mlp.shared_experts.gate_proj.trellis" in stored
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"].shape == (16,)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v41"])
def test_dense_layers_are_refused_where_every_layer_has_experts(family: str) -> None:
    with pytest.raises(UsageError, match="every layer of a"):
        SynthSpec(family=family)


def test_a_thin_v41_has_each_kind_of_layer_once(tmp_path: Path) -> None:
    synthesize(tmp_path / "m", SynthSpec(**THIN))
    stored, text = tensors(tmp_path / "m"), config(tmp_path / "m")["text_config"]
    assert text["compress_ratios"] == [0, 2, 1]
    assert not any(".layers.0.attn.indexer" in name for name in stored)
    gates = [name for name in stored if name.endswith("compressor.wgate.weight")]
    assert gates == ["layers.1.attn.compressor.wgate.weight"]  # nothing to weigh at ratio 1
    assert stored["layers.2.attn.indexer.wk.weight"].shape == (128, 512)
    assert stored["layers.1.engram.wkv.weight"].shape == (5 * 256, 24 * 256)
    (table,) = read_checkpoint(tmp_path / "m").tables
    assert (table.layer, table.format, table.row_bytes) == (1, "int4", 144)
    assert text["engram_num_embeddings"] == [table.rows] == [v41_thin.table_rows()]


def test_int4_and_fp8_tables_hold_the_same_values(tmp_path: Path) -> None:
    rows = {}
    for stored_as in ("int4", "fp8"):
        synthesize(tmp_path / stored_as, SynthSpec(**THIN, table_format=stored_as))
        found = tensors(tmp_path / stored_as)
        weight, scale = (found[f"layers.1.engram.embed.{part}"] for part in ("weight", "scale"))
        packed = torch.cat((weight.view(torch.uint8), scale.view(torch.uint8)), 1)
        assert packed.shape[1] == lookup.ROW_BYTES[stored_as]
        rows[stored_as] = lookup.unpack(packed, stored_as)
    assert torch.equal(rows["int4"], rows["fp8"])
    assert 0.5 < rows["int4"].std() < 2 and rows["int4"].unique().numel() > 20


def test_tokens_that_read_alike_are_counted_once() -> None:
    """Against Python's own Unicode tables instead of the library's normalisers."""
    text, _ = tokenizer.train(1024)
    import tokenizers as hf

    bpe = hf.Tokenizer.from_str(text)
    keys = set()
    for token in range(1024):
        word = bpe.decode([token], skip_special_tokens=False)
        if "\ufffd" in word:
            keys.add(bpe.id_to_token(token))
            continue
        flat = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", word))
        flat = "".join(c for c in flat if not unicodedata.combining(c)).lower()
        for space in "\t\r\n":
            flat = flat.replace(space, " ")
        flat = " ".join(part for part in flat.split(" ") if part) or flat[:1]
        keys.add(flat or word)
    assert tokenizer.folded_size(text) == len(keys) < 1024
