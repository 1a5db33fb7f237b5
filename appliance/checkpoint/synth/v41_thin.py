"""A thin DeepSeek-V4.1: true kinds of layers, few of them, as vLLM 0.33.0's class loads it.

Layer 0 attends to a sliding window alone, layer 1 has an Engram table and a compressed cache of
every second token, layer 2 and those after it one of every token. Names are those of the release;
shapes are vLLM's. Routed experts are EXL3, attention and shared expert bf16 or FP8 as released
(a scale for 32 x 32 values), the rest bf16. The table's values are small integers times powers of
two, which int4 and FP8 rows both hold exactly.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from math import isqrt, log2, sqrt
from random import Random

from appliance.checkpoint.synth import blocks, draw, tokenizer
from appliance.checkpoint.synth.parts import Part, dense, norm
from appliance.checkpoint.synth.spec import SynthSpec

HEAD_DIM, ROPE, KV_WINDOW, STREAMS, O_RANK = 512, 64, 128, 4, 1024
INDEX_HEADS, INDEX_DIM, INDEX_TOP = 32, 128, 512
ENGRAM_LAYER, NGRAM, NGRAM_HEADS, ROW_VALUES, ROW_GROUP = 1, 4, 8, 256, 32
SCALED = 32  # values along each side that share a scale
HASHES = (NGRAM - 1) * NGRAM_HEADS
NGRAM_VOCABULARY = 1009
PAD_TOKEN = 4
MIXES = (2 + STREAMS) * STREAMS


NON_ROUTED: dict[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
}


def config(spec: SynthSpec) -> dict[str, object]:
    shared = blocks.config(spec)
    for own in ("attention_bias", "attention_dropout", "intermediate_size", "torch_dtype"):
        del shared[own]
    text = {
        **shared,
        "model_type": "deepseek_v41_text",
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE,
        "q_lora_rank": _q_rank(spec),
        "o_lora_rank": O_RANK,
        "o_groups": _groups(spec),
        "sliding_window": KV_WINDOW,
        "hc_mult": STREAMS,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": spec.experts,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "num_nextn_predict_layers": 0,
        "compress_ratios": [_ratio(layer) for layer in range(spec.layers)],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": INDEX_TOP,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": blocks.CONTEXT // 4,
        },
        "engram_layer_ids": [ENGRAM_LAYER],
        "engram_num_embeddings": [table_rows()],
        "engram_max_ngram_size": NGRAM,
        "engram_n_heads": NGRAM_HEADS,
        "engram_head_dim": ROW_VALUES,
        "engram_vocab_size": NGRAM_VOCABULARY,
        "engram_compressed_vocab_size": tokenizer.folded_size(tokenizer.train(spec.vocab_size)[0]),
        "engram_pad_token_id": PAD_TOKEN,
    }  # fmt: skip
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",  # vLLM's hyper-connections take no other
        "text_config": text,
    }


def table_rows() -> int:
    """Every (n-gram order, head) has its own prime number of rows, from NGRAM_VOCABULARY up."""
    primes: list[int] = []
    number = NGRAM_VOCABULARY
    while len(primes) < HASHES:
        if all(number % d for d in range(2, isqrt(number) + 1)):
            primes.append(number)
        number += 1
    return sum(primes)


def parts(spec: SynthSpec, quiet: Collection[int]) -> Iterator[Part]:
    hidden = spec.hidden_size
    size = spec.vocab_size * hidden
    yield Part("embed.weight", "BF16", (spec.vocab_size, hidden), draw.normal(size, 1.0))
    for layer in range(spec.layers):
        name = f"layers.{layer}"
        if layer == ENGRAM_LAYER:
            yield from _engram(spec, f"{name}.engram")
        yield norm(f"{name}.attn_norm", hidden)
        yield norm(f"{name}.ffn_norm", hidden)
        for which in ("hc_attn", "hc_ffn"):
            mixed = draw.normal_f32(MIXES * STREAMS * hidden, (STREAMS * hidden) ** -0.5)
            yield Part(f"{name}.{which}_fn", "F32", (MIXES, STREAMS * hidden), mixed)
            yield Part(f"{name}.{which}_base", "F32", (MIXES,), draw.normal_f32(MIXES, 0.5))
            yield Part(f"{name}.{which}_scale", "F32", (3,), draw.normal_f32(3, 0.5))
        yield from _attention(spec, f"{name}.attn", _ratio(layer), layer in (1, 2))
        yield from _moe(spec, f"{name}.ffn")
    yield norm("norm", hidden)
    yield from dense("head", hidden, spec.vocab_size, gain=blocks.HEAD_GAIN, quiet=quiet)


def _ratio(layer: int) -> int:
    return (0, 2)[layer] if layer < 2 else 1


def _q_rank(spec: SynthSpec) -> int:
    return spec.hidden_size // 4


def _groups(spec: SynthSpec) -> int:
    return max(1, spec.heads // 8)


def _attention(spec: SynthSpec, name: str, ratio: int, source: bool) -> Iterator[Part]:
    hidden, rank, groups = spec.hidden_size, _q_rank(spec), _groups(spec)
    outputs = spec.heads * HEAD_DIM
    yield Part(f"{name}.attn_sink", "F32", (spec.heads,), draw.normal_f32(spec.heads, 1.0))
    yield from _linear(spec, f"{name}.wq_a", hidden, rank)
    yield norm(f"{name}.q_norm", rank)
    yield from _linear(spec, f"{name}.wq_b", rank, outputs)
    yield from _linear(spec, f"{name}.wkv", hidden, HEAD_DIM)
    yield norm(f"{name}.kv_norm", HEAD_DIM)
    yield from _linear(spec, f"{name}.wo_a", outputs // groups, groups * O_RANK)
    yield from _linear(spec, f"{name}.wo_b", groups * O_RANK, hidden, gain=blocks.OUTPUT_GAIN)
    if not source:
        return
    yield from dense(f"{name}.compressor.wkv", hidden, HEAD_DIM)
    if ratio > 1:
        yield from dense(f"{name}.compressor.wgate", hidden, HEAD_DIM)
    yield norm(f"{name}.compressor.norm", HEAD_DIM)
    yield from _linear(spec, f"{name}.indexer.wq_b", rank, INDEX_HEADS * INDEX_DIM)
    yield from dense(f"{name}.indexer.wk", HEAD_DIM, INDEX_DIM)
    yield norm(f"{name}.indexer.k_norm", INDEX_DIM)
    yield from dense(f"{name}.indexer.weights_proj", hidden, INDEX_HEADS)


def _linear(spec: SynthSpec, name: str, k: int, n: int, gain: float = 1.0) -> Iterator[Part]:
    if spec.dense_format == "bf16":
        yield from dense(name, k, n, gain=gain)
        return
    # Magnitudes 0.25 to 1.875: a sign, exponents 5 to 7, and three bits behind the point.
    table = bytes((b & 0x80) | (5 + (b >> 3 & 15) % 3) << 3 | b & 7 for b in range(256))
    power = 127 + round(log2(gain / sqrt(k)))
    count = n // SCALED * (k // SCALED)
    values = lambda random: random.randbytes(n * k).translate(table)  # noqa: E731
    yield Part(f"{name}.weight", "F8_E4M3", (n, k), values)
    scales = lambda random: bytes(power + b % 2 for b in random.randbytes(count))  # noqa: E731
    yield Part(f"{name}.scale", "F8_E8M0", (n // SCALED, k // SCALED), scales)


def _moe(spec: SynthSpec, name: str) -> Iterator[Part]:
    yield from blocks.router(spec, f"{name}.gate")
    yield Part(f"{name}.gate.bias", "F32", (spec.experts,), draw.normal_f32(spec.experts, 0.05))
    words = ("w1", "w3", "w2")
    yield from blocks.experts(spec, f"{name}.experts", words)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    yield from _linear(spec, f"{name}.shared_experts.w1", hidden, inner, gain=blocks.GATE_GAIN)
    yield from _linear(spec, f"{name}.shared_experts.w3", hidden, inner)
    yield from _linear(spec, f"{name}.shared_experts.w2", inner, hidden, gain=blocks.OUTPUT_GAIN)


def _engram(spec: SynthSpec, name: str) -> Iterator[Part]:
    hidden, rows, groups = spec.hidden_size, table_rows(), ROW_VALUES // ROW_GROUP
    if spec.table_format == "int4":
        width, value_type, scale_type = ROW_VALUES // 2, "U8", "F16"
    else:
        width, value_type, scale_type = ROW_VALUES, "F8_E4M3", "F8_E8M0"
    values, scales = _table_values(rows, value_type), _table_scales(rows * groups, scale_type)
    yield Part(f"{name}.embed.weight", value_type, (rows, width), values)
    yield Part(f"{name}.embed.scale", scale_type, (rows, groups), scales)
    yield from dense(f"{name}.wkv", HASHES * ROW_VALUES, (STREAMS + 1) * hidden)
    for which in ("q_weight", "k_weight"):
        weights = draw.normal(STREAMS * hidden, 0.1, mean=1.0)
        yield Part(f"{name}.{which}", "BF16", (STREAMS, hidden), weights)


def _table_values(rows: int, dtype: str) -> draw.Draw:
    """The same integers -8 to 7 for both types: two a byte, value + 8 in half a byte; or e4m3."""

    def draw_values(random: Random) -> bytes:
        packed = random.randbytes(rows * ROW_VALUES // 2)
        if dtype == "U8":
            return packed
        out = bytearray(2 * len(packed))
        out[0::2] = packed.translate(bytes(_e4m3((byte & 15) - 8) for byte in range(256)))
        out[1::2] = packed.translate(bytes(_e4m3((byte >> 4) - 8) for byte in range(256)))
        return bytes(out)

    return draw_values


def _table_scales(count: int, dtype: str) -> draw.Draw:
    """2^-4 to 2^-1, as fp16 or as an E8M0 exponent."""

    def draw_scales(random: Random) -> bytes:
        powers = [-1 - (byte & 3) for byte in random.randbytes(count)]
        if dtype == "F8_E8M0":
            return bytes(127 + power for power in powers)
        return struct.pack(f"<{count}e", *(2.0**power for power in powers))

    return draw_scales


def _e4m3(value: int) -> int:
    """The byte of a whole number from -8 to 8: sign, 4 bits of exponent + 7, 3 of mantissa."""
    if value == 0:
        return 0
    exponent = abs(value).bit_length() - 1
    mantissa = (abs(value) << 3 >> exponent) & 7
    return (0x80 if value < 0 else 0) | (exponent + 7) << 3 | mantissa
