"""Mixtral: config.json and tensors, named as vLLM's and transformers' MixtralForCausalLM.

Every layer has experts; gate, up and down are called w1, w3 and w2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from appliance.checkpoint.synth import blocks, qwen3_moe
from appliance.checkpoint.synth.parts import Part
from appliance.checkpoint.synth.spec import SynthSpec


def config(spec: SynthSpec) -> dict[str, object]:
    shared = blocks.config(spec)
    del shared["moe_intermediate_size"]
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **shared,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "num_key_value_heads": spec.kv_heads,
        "num_local_experts": spec.experts,
        "output_router_logits": False,
        "rope_theta": 10000.0,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def parts(spec: SynthSpec, quiet: Collection[int]) -> Iterator[Part]:
    attention = partial(qwen3_moe.attention, norms=False)
    return blocks.decoder(spec, quiet, attention, _moe, "block_sparse_moe")


def _moe(spec: SynthSpec, name: str) -> Iterator[Part]:
    yield from blocks.router(spec, f"{name}.gate")
    yield from blocks.experts(spec, f"{name}.experts", ("w1", "w3", "w2"))
