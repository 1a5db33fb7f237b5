"""GLM-4.5: config.json and tensors, named as vLLM's and transformers' Glm4MoeForCausalLM."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from appliance.checkpoint.synth import blocks, deepseek_v3, qwen3_moe
from appliance.checkpoint.synth.parts import Part
from appliance.checkpoint.synth.spec import SynthSpec


def config(spec: SynthSpec) -> dict[str, object]:
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **blocks.config(spec),
        "attention_bias": True,
        "first_k_dense_replace": spec.dense_layers,
        "head_dim": spec.head_dim,
        "n_group": 1,
        "n_routed_experts": spec.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": spec.kv_heads,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.5,
        "topk_group": 1,
        "use_qk_norm": True,
    }


def parts(spec: SynthSpec, quiet: Collection[int]) -> Iterator[Part]:
    attention = partial(qwen3_moe.attention, bias=True)
    return blocks.decoder(spec, quiet, attention, deepseek_v3.moe)
