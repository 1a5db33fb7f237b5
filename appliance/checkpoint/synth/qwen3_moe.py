"""Qwen3-MoE: config.json and tensors, named as vLLM's and transformers' Qwen3MoeForCausalLM."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from appliance.checkpoint.synth import blocks
from appliance.checkpoint.synth.parts import Part, dense, exl3, norm, splits_over_two_ranks
from appliance.checkpoint.synth.spec import SynthSpec


def config(spec: SynthSpec) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **blocks.config(spec),
        "decoder_sparse_step": 1,
        "head_dim": spec.head_dim,
        "mlp_only_layers": list(range(spec.dense_layers)),
        "norm_topk_prob": True,
        "num_experts": spec.experts,
        "num_key_value_heads": spec.kv_heads,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_sliding_window": False,
    }


def parts(spec: SynthSpec, quiet: Collection[int]) -> Iterator[Part]:
    yield blocks.embedding(spec)
    for layer in range(spec.layers):
        name = f"model.layers.{layer}"
        yield norm(f"{name}.input_layernorm", spec.hidden_size)
        yield from _attention(spec, f"{name}.self_attn")
        yield norm(f"{name}.post_attention_layernorm", spec.hidden_size)
        if layer < spec.dense_layers:
            yield from blocks.mlp(spec, f"{name}.mlp", 2 * spec.hidden_size)
            continue
        yield from blocks.router(spec, f"{name}.mlp.gate")
        yield from blocks.experts(spec, f"{name}.mlp.experts")
    yield norm("model.norm", spec.hidden_size)
    yield from blocks.head(spec, quiet)


def _attention(spec: SynthSpec, name: str) -> Iterator[Part]:
    hidden, q, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    # vLLM merges q, k and v into one module, which is EXL3 as a whole or not at all.
    merged = all(splits_over_two_ranks(hidden, n, along="n") for n in (q, kv))
    for projection, n in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        if merged:
            yield from exl3(f"{name}.{projection}", hidden, n, spec.dense_bits, spec.codebook)
        else:
            yield from dense(f"{name}.{projection}", hidden, n)
    yield norm(f"{name}.q_norm", spec.head_dim)
    yield norm(f"{name}.k_norm", spec.head_dim)
    yield from blocks.linear(spec, f"{name}.o_proj", q, hidden, along="k", gain=blocks.OUTPUT_GAIN)
