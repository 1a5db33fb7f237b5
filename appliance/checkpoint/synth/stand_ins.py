"""Headers of the other models an operator brings, as 3-bit EXL3.

Exact, from FACTS section 1: layers, experts, top-k, hidden and intermediate size, hence every byte
of the routed experts. Everything else (attention, vocabulary, shared experts, the n-gram table's
rows, Qwen's top-10) is a stand-in with names of the family and a plausible size: no public figure
closes it, so do not quote totals of these models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from appliance.checkpoint.synth import v4_blocks as v4
from appliance.checkpoint.synth.parts import Part, exl3

Model = tuple[dict[str, object], Iterator[Part]]
QUANTIZATION: dict[str, object] = {"quant_method": "exl3", "bits": 3.0, "codebook": "mcg"}


@dataclass(frozen=True, slots=True)
class Plain:
    """A model with grouped-query attention, in the names that transformers gives it."""

    model_type: str
    architecture: str
    layers: int  # dense and MoE together
    dense_layers: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    vocabulary: int
    shared: int
    heads: int
    kv_heads: int
    table_rows: int = 0
    head_dim: int = 128


GLM = Plain("glm5_next", "Glm5NextForCausalLM", 45, 3, 288, 8, 4096, 2048, 151_552, 1, 32, 8)
QWEN = Plain(
    "qwen4_exp", "Qwen4ExpForCausalLM", 48, 0, 512, 10, 2560, 640, 151_936, 1, 20, 4, 8_000_000
)
V4_FLASH, V4_LAYERS, V4_EXPERTS = v4.Shape(hidden=4096, inner=2048, q_rank=1024), 43, 256
TABLE_DIM = 256


def glm() -> Model:
    return _config(GLM), _parts(GLM)


def qwen() -> Model:
    return _config(QWEN), _parts(QWEN)


def v4_flash() -> Model:
    config = v4.config(V4_FLASH) | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": V4_LAYERS,
        "n_routed_experts": V4_EXPERTS,
        "num_experts_per_tok": 6,
        "vocab_size": 129_280,
        "max_position_embeddings": 1 << 20,
        "quantization_config": QUANTIZATION,
    }
    return config, _v4_parts()


def _v4_parts() -> Iterator[Part]:
    ends = (129_280, V4_FLASH.hidden)
    yield Part("embed.weight", "BF16", ends)
    for number in range(V4_LAYERS):
        yield from v4.layer(f"layers.{number}", V4_FLASH, V4_EXPERTS, v4.exl3)
    yield Part("norm.weight", "BF16", (V4_FLASH.hidden,))
    yield Part("head.weight", "BF16", ends)


def _parts(model: Plain) -> Iterator[Part]:
    ends = (model.vocabulary, model.hidden)
    yield Part("model.embed_tokens.weight", "BF16", ends)
    for number in range(model.layers):
        name = f"model.layers.{number}"
        yield Part(f"{name}.input_layernorm.weight", "BF16", (model.hidden,))
        yield from _attention(f"{name}.self_attn", model)
        yield Part(f"{name}.post_attention_layernorm.weight", "BF16", (model.hidden,))
        if model.table_rows and number == 0:
            table = f"{name}.ple.ple_embedding.ngram_embedding.weight"
            yield Part(table, "BF16", (model.table_rows, TABLE_DIM))
        if number < model.dense_layers:
            yield from _mlp(f"{name}.mlp", model.hidden, 3 * model.hidden)
            continue
        yield Part(f"{name}.mlp.gate.weight", "BF16", (model.experts, model.hidden))
        for expert in range(model.experts):
            yield from _mlp(f"{name}.mlp.experts.{expert}", model.hidden, model.inner)
        if model.shared:
            yield from _mlp(f"{name}.mlp.shared_experts", model.hidden, model.inner)
    yield Part("model.norm.weight", "BF16", (model.hidden,))
    yield Part("lm_head.weight", "BF16", ends)


def _attention(name: str, model: Plain) -> Iterator[Part]:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield from _exl3(f"{name}.q_proj", model.hidden, q)
    yield from _exl3(f"{name}.k_proj", model.hidden, kv)
    yield from _exl3(f"{name}.v_proj", model.hidden, kv)
    yield from _exl3(f"{name}.o_proj", q, model.hidden)


def _mlp(name: str, hidden: int, inner: int) -> Iterator[Part]:
    yield from _exl3(f"{name}.gate_proj", hidden, inner)
    yield from _exl3(f"{name}.up_proj", hidden, inner)
    yield from _exl3(f"{name}.down_proj", inner, hidden)


def _exl3(name: str, k: int, n: int) -> Iterator[Part]:
    return exl3(name, k, n, 3, "mcg")


def _config(model: Plain) -> dict[str, object]:
    return {
        "architectures": [model.architecture],
        "model_type": model.model_type,
        "num_hidden_layers": model.layers,
        "first_k_dense_replace": model.dense_layers,
        "hidden_size": model.hidden,
        "intermediate_size": 3 * model.hidden,
        "moe_intermediate_size": model.inner,
        "n_routed_experts": model.experts,
        "n_shared_experts": model.shared,
        "num_experts_per_tok": model.top_k,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": 1 << 18,
        "quantization_config": QUANTIZATION,
    }
