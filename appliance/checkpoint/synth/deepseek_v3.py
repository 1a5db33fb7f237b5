"""DeepSeek-V3: config.json and tensors, named as vLLM's and transformers' DeepseekV3ForCausalLM.

vLLM 0.32.0's CPU op for rotary embedding takes [tokens, heads, 64] for [tokens, 64] and rotates the
wrong rows, so in eager mode this family answers wrongly there, and differently in every batch:
serve it with compilation_config {"custom_ops": ["all", "-rotary_embedding"]}.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from appliance.checkpoint.synth import blocks, draw
from appliance.checkpoint.synth.parts import Part, dense, norm
from appliance.checkpoint.synth.spec import SynthSpec

# vLLM's CPU attention for compressed KV wants the real model's latent and rotary sizes.
KV_RANK = 512
ROPE = 64
Q_RANK = 256
BIAS_STD = 0.05  # of the scores' 0 to 1: it moves choices without deciding them


def config(spec: SynthSpec) -> dict[str, object]:
    groups = _groups(spec)
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **blocks.config(spec),
        "first_k_dense_replace": spec.dense_layers,
        "kv_lora_rank": KV_RANK,
        "moe_layer_freq": 1,
        "n_group": groups,
        "n_routed_experts": spec.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": spec.heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": Q_RANK,
        "qk_nope_head_dim": spec.head_dim,
        "qk_rope_head_dim": ROPE,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sigmoid",
        "topk_group": max(1, groups // 2),
        "topk_method": "noaux_tc",
        "v_head_dim": spec.head_dim,
    }


def _groups(spec: SynthSpec) -> int:
    """4 groups of which 2 are searched, where their experts suffice for a top-k; else no groups."""
    return 4 if spec.experts % 4 == 0 and spec.experts >= max(8, 2 * spec.top_k) else 1


def parts(spec: SynthSpec, quiet: Collection[int]) -> Iterator[Part]:
    return blocks.decoder(spec, quiet, _attention, moe)


def _attention(spec: SynthSpec, name: str) -> Iterator[Part]:
    """vLLM merges q_a with kv_a, whose 576 outputs are no multiple of 128, and reads the plain
    weight of kv_b: these three stay bf16."""
    hidden, heads, dim = spec.hidden_size, spec.heads, spec.head_dim
    yield from dense(f"{name}.q_a_proj", hidden, Q_RANK)
    yield norm(f"{name}.q_a_layernorm", Q_RANK)
    yield from blocks.linear(spec, f"{name}.q_b_proj", Q_RANK, heads * (dim + ROPE), along="n")
    yield from dense(f"{name}.kv_a_proj_with_mqa", hidden, KV_RANK + ROPE)
    yield norm(f"{name}.kv_a_layernorm", KV_RANK)
    yield from dense(f"{name}.kv_b_proj", KV_RANK, heads * 2 * dim)
    gain = blocks.OUTPUT_GAIN
    yield from blocks.linear(spec, f"{name}.o_proj", heads * dim, hidden, along="k", gain=gain)


def moe(spec: SynthSpec, name: str) -> Iterator[Part]:
    """Router with a bias for choosing, routed experts, one shared expert."""
    yield from blocks.router(spec, f"{name}.gate")
    bias = f"{name}.gate.e_score_correction_bias"
    yield Part(bias, "F32", (spec.experts,), draw.normal_f32(spec.experts, BIAS_STD))
    yield from blocks.experts(spec, f"{name}.experts")
    yield from blocks.mlp(spec, f"{name}.shared_experts", spec.intermediate_size)
