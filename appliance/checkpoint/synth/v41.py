"""Headers of DeepSeek-V4.1-Flash: the 3-bit EXL3 package and the official FP4 + FP8 release.

FACTS' ledger of the official release closes part by part to 0.01 GiB with vLLM's shapes: routed
268.95, Engram 189.13, draft 7.39, attention 4.72, shared 1.32, embedding 1.23, head 1.23, vision
0.90, other 0.37; 475.2 in all. Not public, and chosen here so that it does close: the Engram
vocabulary (16,000,000), the Markov head's rank (256), 32 vision blocks of 1024 x 2816, and
what of "other" is no router, norm or hyper-connection (indexers in every fourth layer).

The package does not close. Experts at K = 3 are 190.48 GiB, int4 tables 103.00, and the draft with
EXL3 experts 5.43, so with all else as released it is 308.98 GiB, where FACTS say 309.3. Engram
projections in BF16 instead of FP8 add 0.29 and make it 309.28: assumed here, not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isqrt

from appliance.checkpoint.synth import v4_blocks as v4
from appliance.checkpoint.synth.parts import Part

SHAPE = v4.Shape(hidden=5120, inner=2304, q_rank=1280)
HIDDEN, LAYERS, EXPERTS, VOCABULARY = SHAPE.hidden, 40, 384, 129_280
STAGES, STAGE_EXPERTS, TARGET_LAYERS, MARKOV_RANK = 3, 128, (37, 38, 39), 256
ENGRAM_LAYERS, ENGRAM_ORDERS, ENGRAM_HEADS, ENGRAM_DIM = (1, 14), 3, 8, 256
ENGRAM_HASHES, ENGRAM_VOCABULARY = ENGRAM_ORDERS * ENGRAM_HEADS, 16_000_000
INDEXED, INDEX_HEADS, INDEX_DIM = range(2, LAYERS, 4), 32, 128
COMPRESSOR_ROWS = 130
VISION_BLOCKS, VISION_DIM, VISION_INNER, VISION_PATCH, VISION_MERGE = 32, 1024, 2816, 14, 3

Model = tuple[dict[str, object], Iterator[Part]]
Table = Callable[[str, int], Iterator[Part]]
FP8: dict[str, object] = {
    "quant_method": "fp8",
    "weight_block_size": [v4.SCALED, v4.SCALED],
    "scale_fmt": "ue8m0",
}


def package() -> Model:
    """config.json and tensors of the EXL3 package: K = 3 experts, int4 Engram tables."""
    quantization: dict[str, object] = {
        "quant_method": "exl3",
        "bits": 3.0,
        "codebook": "mcg",
        "non_routed_quantization": FP8,
    }
    return _config(quantization), _parts(v4.exl3, _int4_table, v4.bf16)


def official() -> Model:
    """config.json and tensors of the official release: FP4 experts, FP8 tables and linears."""
    return _config({**FP8, "expert_dtype": "fp4"}), _parts(v4.fp4, _fp8_table, v4.fp8)


def engram_rows() -> dict[int, int]:
    """Rows of each layer's table: every (n-gram order, head) has its own prime number of them."""
    primes: list[int] = []
    number = ENGRAM_VOCABULARY
    while len(primes) < ENGRAM_HASHES * len(ENGRAM_LAYERS):
        if all(number % d for d in range(2, isqrt(number) + 1)):
            primes.append(number)
        number += 1
    return {
        layer: sum(primes[i * ENGRAM_HASHES : (i + 1) * ENGRAM_HASHES])
        for i, layer in enumerate(ENGRAM_LAYERS)
    }


def _parts(routed: v4.Linear, table: Table, wkv: v4.Linear) -> Iterator[Part]:
    yield Part("embed.weight", "BF16", (VOCABULARY, HIDDEN))
    rows = engram_rows()
    for number in range(LAYERS):
        name = f"layers.{number}"
        if number in rows:
            yield from table(f"{name}.engram.embed", rows[number])
            outputs = HIDDEN * (SHAPE.streams + 1)
            yield from wkv(f"{name}.engram.wkv", ENGRAM_HASHES * ENGRAM_DIM, outputs)
            yield Part(f"{name}.engram.q_weight", "BF16", (SHAPE.streams, HIDDEN))
            yield Part(f"{name}.engram.k_weight", "BF16", (SHAPE.streams, HIDDEN))
        yield from v4.layer(name, SHAPE, EXPERTS, routed)
        yield Part(f"{name}.ffn.gate.bias_vl", "F32", (EXPERTS,))
        if number in INDEXED:
            yield from _indexer(f"{name}.attn")
    yield from _draft(routed)
    yield from _vision()
    yield Part("norm.weight", "BF16", (HIDDEN,))
    yield Part("head.weight", "BF16", (VOCABULARY, HIDDEN))


def _int4_table(name: str, rows: int) -> Iterator[Part]:
    """Ours: two values a byte and an fp16 scale per 32 values, 144 B a row."""
    yield Part(f"{name}.weight", "U8", (rows, ENGRAM_DIM // 2))
    yield Part(f"{name}.scale", "F16", (rows, ENGRAM_DIM // v4.SCALED))


def _fp8_table(name: str, rows: int) -> Iterator[Part]:
    """A byte a value and an E8M0 scale per 32 values, 264 B a row."""
    yield Part(f"{name}.weight", "F8_E4M3", (rows, ENGRAM_DIM))
    yield Part(f"{name}.scale", "F8_E8M0", (rows, ENGRAM_DIM // v4.SCALED))


def _indexer(name: str) -> Iterator[Part]:
    yield from v4.fp8(f"{name}.indexer.wq_b", SHAPE.q_rank, INDEX_HEADS * INDEX_DIM)
    yield Part(f"{name}.indexer.wk.weight", "BF16", (INDEX_DIM, SHAPE.head_dim))
    yield Part(f"{name}.indexer.k_norm.weight", "BF16", (INDEX_DIM,))
    yield Part(f"{name}.indexer.weights_proj.weight", "BF16", (INDEX_HEADS, HIDDEN))
    for which in ("wkv", "wgate"):
        yield Part(f"{name}.compressor.{which}.weight", "BF16", (COMPRESSOR_ROWS, HIDDEN))


def _draft(routed: v4.Linear) -> Iterator[Part]:
    yield from v4.fp8("mtp.0.main_proj", len(TARGET_LAYERS) * HIDDEN, HIDDEN)
    yield Part("mtp.0.main_norm.weight", "BF16", (HIDDEN,))
    for stage in range(STAGES):
        yield from v4.layer(f"mtp.{stage}", SHAPE, STAGE_EXPERTS, routed)
    for end in ("embed", "head"):
        yield Part(f"mtp.{STAGES - 1}.markov_head.{end}.weight", "BF16", (VOCABULARY, MARKOV_RANK))


def _vision() -> Iterator[Part]:
    dim, inner = VISION_DIM, VISION_INNER
    yield from v4.bf16("vision.patch_embed.proj", 3 * VISION_PATCH**2, dim)
    for number in range(VISION_BLOCKS):
        name = f"vision.blocks.{number}"
        yield from v4.bf16(f"{name}.attn.wqkv", dim, 3 * dim)
        yield from v4.bf16(f"{name}.attn.wo", dim, dim)
        yield Part(f"{name}.attn.wo.bias", "BF16", (dim,))
        yield from v4.bf16(f"{name}.mlp.w1", dim, 2 * inner)
        yield from v4.bf16(f"{name}.mlp.w2", inner, dim)
    yield from v4.bf16("aligner.w1", dim * VISION_MERGE**2, HIDDEN)
    yield from v4.bf16("aligner.w2", HIDDEN, HIDDEN)
    for which in ("image_start", "image_end", "image_newline"):
        yield Part(which, "BF16", (HIDDEN,))


def _config(quantization: dict[str, object]) -> dict[str, object]:
    text = {
        **v4.config(SHAPE),
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 6,
        "max_position_embeddings": 1 << 20,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": 512,
        "engram_layer_ids": list(ENGRAM_LAYERS),
        "engram_max_ngram_size": ENGRAM_ORDERS + 1,
        "engram_n_heads": ENGRAM_HEADS,
        "engram_head_dim": ENGRAM_DIM,
        "engram_vocab_size": ENGRAM_VOCABULARY,
        "engram_num_embeddings": list(engram_rows().values()),
        "num_nextn_predict_layers": STAGES,
        "dspark_n_routed_experts": STAGE_EXPERTS,
        "dspark_num_experts_per_tok": 3,
        "dspark_target_layer_ids": list(TARGET_LAYERS),
        "dspark_markov_rank": MARKOV_RANK,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "quantization_config": quantization,
        "text_config": text,
    }
