"""Qwen3-MoE: config.json and tensors, named as vLLM's and transformers' Qwen3MoeForCausalLM."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from appliance.checkpoint.synth import blocks, draw
from appliance.checkpoint.synth.parts import Part, dense, exl3, norm, splits_over_two_ranks
from appliance.checkpoint.synth.spec import SynthSpec

BIAS_SIZE = 0.2  # of outputs of 1: seen if left out


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
    return blocks.decoder(spec, quiet, attention, _moe)


def attention(
    spec: SynthSpec, name: str, *, bias: bool = False, norms: bool = True
) -> Iterator[Part]:
    """Grouped-query attention; `bias`: of q, k and v, `norms`: of every head of q and k."""
    hidden, q, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    # vLLM merges q, k and v into one module, which is EXL3 as a whole or not at all.
    merged = all(splits_over_two_ranks(hidden, n, along="n") for n in (q, kv))
    for projection, n in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        if merged:
            yield from exl3(f"{name}.{projection}", hidden, n, spec.dense_bits, spec.codebook)
        else:
            yield from dense(f"{name}.{projection}", hidden, n)
        if bias:
            yield Part(f"{name}.{projection}.bias", "F16", (n,), draw.scales(n, BIAS_SIZE))
    if norms:
        yield norm(f"{name}.q_norm", spec.head_dim)
        yield norm(f"{name}.k_norm", spec.head_dim)
    yield from blocks.linear(spec, f"{name}.o_proj", q, hidden, along="k", gain=blocks.OUTPUT_GAIN)


def _moe(spec: SynthSpec, name: str) -> Iterator[Part]:
    yield from blocks.router(spec, f"{name}.gate")
    yield from blocks.experts(spec, f"{name}.experts")
