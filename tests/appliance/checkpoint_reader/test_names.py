"""What a name says: layer, role, and whether vLLM shards it over tensor-parallel ranks."""

from pathlib import Path

import pytest

from appliance.checkpoint.names import layer_of, place

REPLICATED, SHARDED = False, True


@pytest.mark.parametrize(
    ("name", "role", "sharded"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "attention", SHARDED),
        ("model.layers.3.self_attn.o_proj.trellis", "attention", SHARDED),
        ("model.layers.3.self_attn.q_norm.weight", "attention", REPLICATED),
        ("model.layers.3.self_attn.q_a_proj.weight", "attention", REPLICATED),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", "attention", REPLICATED),
        ("model.layers.3.self_attn.kv_b_proj.weight", "attention", SHARDED),
        ("model.layers.3.self_attn.indexer.wk.weight", "attention", REPLICATED),
        ("model.layers.3.linear_attn.in_proj_qkvz.weight", "attention", SHARDED),
        ("model.layers.3.mlp.gate.weight", "router", REPLICATED),
        ("model.layers.3.mlp.gate_proj.weight", "mlp", SHARDED),
        ("model.layers.3.mlp.router.bias", "router", REPLICATED),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "shared_experts", SHARDED),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", "shared_experts", SHARDED),
        ("model.layers.3.mlp.shared_expert_gate.weight", "shared_experts", REPLICATED),
        ("model.layers.3.post_attention_layernorm.weight", "norm", REPLICATED),
        ("model.embed_tokens.weight", "embedding", SHARDED),
        ("lm_head.weight", "head", SHARDED),
        ("model.visual.blocks.0.attn.qkv.weight", "vision", SHARDED),
        ("model.visual.blocks.0.norm1.weight", "vision", REPLICATED),
        ("model.visual.patch_embed.proj.weight", "vision", REPLICATED),
        ("model.layers.3.ple.key_proj.weight", "lookup", REPLICATED),
        ("model.layers.92.self_attn.q_proj.weight", "draft", SHARDED),
        ("model.layers.92.eh_proj.weight", "draft", REPLICATED),
        ("mtp.0.attn.wq_b.weight", "draft", SHARDED),
        ("mtp.fc.weight", "draft", REPLICATED),
        ("something.else", "other", REPLICATED),
    ],
)
def test_role_and_sharding_by_name(name: str, role: str, sharded: bool) -> None:
    spot = place(name, hidden_layers=92)
    assert (spot.role, spot.sharded) == (role, sharded)


@pytest.mark.parametrize(
    ("name", "layer", "draft"),
    [
        ("layers.3.attn.wq_a.weight", 3, False),
        ("model.layers.3.x", 3, False),
        ("model.language_model.layers.3.x", 3, False),
        ("model.layers.40.x", 40, True),
        ("mtp.1.x", 41, True),
        ("mtp.layers.0.x", 40, True),
        ("model.mtp_layers.2.x", 42, True),
        ("mtp.fc.weight", None, True),
        ("vision.blocks.3.x", None, False),
        ("model.layers.03.x", None, False),
        ("model.layers.99999999999999999999.x", None, False),
    ],
)
def test_layer_numbers(name: str, layer: int | None, draft: bool) -> None:
    assert layer_of(name, hidden_layers=40) == (layer, draft)


@pytest.mark.shared
def test_c015_every_native_name_of_deepseek_v41_has_its_role(shared: Path) -> None:
    names = (shared / "cases/ckpt/C015_names_dsv41_native.txt").read_text().split()
    roles = {name: place(name, 40) for name in names if ".experts." not in name}
    by_role: dict[tuple[str, bool], set[str]] = {}
    for name, spot in roles.items():
        by_role.setdefault((spot.role, spot.sharded), set()).add(name)
    assert by_role["embedding", SHARDED] == {"embed.weight"}
    assert by_role["head", SHARDED] == {"head.weight"}
    assert by_role["draft", REPLICATED] == {"mtp.6.attn.wq_a.weight"}
    assert by_role["lookup", SHARDED] == {"layers.1.engram.wkv.weight"}
    assert by_role["lookup", REPLICATED] == {"layers.1.engram.q_weight", "layers.1.engram.k_weight"}
    assert by_role["router", REPLICATED] == {
        "layers.0.ffn.gate.weight", "layers.0.ffn.gate.bias", "layers.0.ffn.gate.bias_vl",
    }  # fmt: skip
    assert by_role["attention", SHARDED] == {
        "layers.0.attn.attn_sink", "layers.0.attn.wq_b.weight", "layers.0.attn.wo_a.weight",
        "layers.0.attn.wo_b.weight",
    }  # fmt: skip
    assert len(by_role["shared_experts", SHARDED]) == 3
    assert len(by_role["attention", REPLICATED]) == 11
    assert by_role["other", REPLICATED] == {
        f"layers.0.hc_{block}_{part}"
        for block in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    }
    assert roles["layers.2.attn.compressor.wkv.weight"].layer == 2
