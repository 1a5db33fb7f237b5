"""Headers of DeepSeek-V4's layers, whole and not random: names of the release, shapes of vLLM 0.32.

Official linears are FP8 with one E8M0 scale per 32 x 32 values, official experts FP4 with one per
32 values of a row, so an expert of 5120 x 2304 takes 18.8 MB there and 13.3 MB in EXL3 at K = 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from appliance.checkpoint.synth import parts
from appliance.checkpoint.synth.parts import Part

Linear = Callable[[str, int, int], Iterator[Part]]
SCALED = 32  # values that share a scale, along each side
HYPER = ("hc_attn", "hc_ffn")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one model of the V4 family; `streams` are its hyper-connections."""

    hidden: int
    inner: int
    q_rank: int
    heads: int = 64
    head_dim: int = 512
    o_rank: int = 1024
    o_groups: int = 8
    streams: int = 4


def exl3(name: str, k: int, n: int) -> Iterator[Part]:
    return parts.exl3(name, k, n, 3, "mcg")


def fp4(name: str, k: int, n: int) -> Iterator[Part]:
    yield Part(f"{name}.weight", "U8", (n, k // 2))
    yield Part(f"{name}.scale", "F8_E8M0", (n, k // SCALED))


def fp8(name: str, k: int, n: int) -> Iterator[Part]:
    yield Part(f"{name}.weight", "F8_E4M3", (n, k))
    yield Part(f"{name}.scale", "F8_E8M0", (n // SCALED, k // SCALED))


def bf16(name: str, k: int, n: int) -> Iterator[Part]:
    yield Part(f"{name}.weight", "BF16", (n, k))


def layer(name: str, shape: Shape, experts: int, routed: Linear) -> Iterator[Part]:
    """One layer, of the target or of the draft; `routed` stores its experts' projections."""
    yield from _norms(name, attn_norm=shape.hidden, ffn_norm=shape.hidden)
    for which in HYPER:
        mixes = (2 + shape.streams) * shape.streams
        yield Part(f"{name}.{which}_fn", "F32", (mixes, shape.streams * shape.hidden))
        yield Part(f"{name}.{which}_base", "F32", (mixes,))
        yield Part(f"{name}.{which}_scale", "F32", (3,))
    yield from _attention(f"{name}.attn", shape)
    yield Part(f"{name}.ffn.gate.weight", "BF16", (experts, shape.hidden))
    yield Part(f"{name}.ffn.gate.bias", "F32", (experts,))
    for expert in range(experts):
        yield from _mlp(f"{name}.ffn.experts.{expert}", shape, routed)
    yield from _mlp(f"{name}.ffn.shared_experts", shape, fp8)


def _attention(name: str, shape: Shape) -> Iterator[Part]:
    outputs = shape.heads * shape.head_dim
    yield Part(f"{name}.attn_sink", "F32", (shape.heads,))
    yield from _norms(name, q_norm=shape.q_rank, kv_norm=shape.head_dim)
    yield from fp8(f"{name}.wq_a", shape.hidden, shape.q_rank)
    yield from fp8(f"{name}.wq_b", shape.q_rank, outputs)
    yield from fp8(f"{name}.wkv", shape.hidden, shape.head_dim)
    yield from fp8(f"{name}.wo_a", outputs // shape.o_groups, shape.o_groups * shape.o_rank)
    yield from fp8(f"{name}.wo_b", shape.o_groups * shape.o_rank, shape.hidden)


def _mlp(name: str, shape: Shape, linear: Linear) -> Iterator[Part]:
    yield from linear(f"{name}.w1", shape.hidden, shape.inner)
    yield from linear(f"{name}.w3", shape.hidden, shape.inner)
    yield from linear(f"{name}.w2", shape.inner, shape.hidden)


def _norms(name: str, **sizes: int) -> Iterator[Part]:
    for which, size in sizes.items():
        yield Part(f"{name}.{which}.weight", "BF16", (size,))


def config(shape: Shape) -> dict[str, object]:
    """The fields of config.json that the family's models share."""
    return {
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.inner,
        "q_lora_rank": shape.q_rank,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 1,
        "head_dim": shape.head_dim,
        "qk_rope_head_dim": 64,
        "o_lora_rank": shape.o_rank,
        "o_groups": shape.o_groups,
        "hc_mult": shape.streams,
        "hidden_act": "silu",
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "swiglu_limit": 10.0,
    }
