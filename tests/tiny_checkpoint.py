"""Checkpoints made of headers alone: `{name: (dtype, shape)}` in, sparse safetensors files out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BITS = {"I16": 16, "F16": 16, "BF16": 16, "I32": 32, "F32": 32, "U8": 8, "F8_E4M3": 8, "F8_E8M0": 8}
Stored = tuple[str, tuple[int, ...]]
INDEX = "model.safetensors.index.json"


def header_of(tensors: Mapping[str, Stored]) -> tuple[dict[str, Any], int]:
    """A valid header for these tensors, back to back, and the bytes they need."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header, at


def write_raw(file: Path, header: object, data_bytes: int) -> Path:
    """A safetensors file with this header, right or wrong, and so many bytes of nothing."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + data_bytes)
    return file


def write_shard(file: Path, tensors: Mapping[str, Stored]) -> Path:
    return write_raw(file, *header_of(tensors))


def linear(key: str, k: int, n: int, bits: float = 3, codebook: str = "mcg") -> dict[str, Stored]:
    """The stored tensors of one EXL3 linear."""
    parts: dict[str, Stored] = {
        f"{key}.trellis": ("I16", (k // 16, n // 16, int(16 * bits))),
        f"{key}.suh": ("F16", (k,)),
        f"{key}.svh": ("F16", (n,)),
    }
    if codebook != "3inst":
        parts[f"{key}.{codebook}"] = ("I32", ())
    return parts


def expert(
    prefix: str,
    hidden: int,
    inner: int,
    words: Iterable[str],
    bits: float = 3,
    codebook: str = "mcg",
) -> dict[str, Stored]:
    gate, up, down = words
    return {
        **linear(f"{prefix}.{gate}", hidden, inner, bits, codebook),
        **linear(f"{prefix}.{up}", hidden, inner, bits, codebook),
        **linear(f"{prefix}.{down}", inner, hidden, bits, codebook),
    }


@dataclass
class Model:
    """config.json and tensors of a model; change either, then write it."""

    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)

    def write(self, folder: Path, *, shards: int = 1, index: bool | None = None) -> Path:
        """One file without an index, or `shards` files with one (`index` overrides)."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        names = list(self.tensors)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            chosen = {name: self.tensors[name] for name in names[i::shards]}
            write_shard(folder / file, chosen)
            weight_map |= dict.fromkeys(chosen, file)
        if index if index is not None else shards > 1:
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder


def qwen(layers: int = 2, experts: int = 4, *, bits: float = 3, codebook: str = "mcg") -> Model:
    """A Qwen3-MoE in miniature: hidden 256, experts of 128, top-2."""
    model = Model(
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": layers,
            "hidden_size": 256,
            "moe_intermediate_size": 128,
            "intermediate_size": 512,
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "quantization_config": {"quant_method": "exl3", "bits": bits, "codebook": codebook},
        },
        {
            "model.embed_tokens.weight": ("BF16", (1024, 256)),
            "model.norm.weight": ("BF16", (256,)),
            **linear("lm_head", 256, 1024, 6, codebook),
        },
    )
    for layer in range(layers):
        at = f"model.layers.{layer}"
        model.tensors |= {
            f"{at}.input_layernorm.weight": ("BF16", (256,)),
            f"{at}.mlp.gate.weight": ("BF16", (experts, 256)),
            **linear(f"{at}.self_attn.q_proj", 256, 256, bits, codebook),
            **linear(f"{at}.self_attn.o_proj", 256, 256, bits, codebook),
        }
        words = ("gate_proj", "up_proj", "down_proj")
        for e in range(experts):
            model.tensors |= expert(f"{at}.mlp.experts.{e}", 256, 128, words, bits, codebook)
    return model


def deepseek(layers: int = 2, experts: int = 4, draft_experts: int = 2) -> Model:
    """A DeepSeek-V4.1 in miniature: native names, an Engram table, one draft layer, top-2."""
    model = Model(
        {
            "model_type": "deepseek_v41",
            "quantization_config": {"quant_method": "exl3", "bits": 3.0, "codebook": "mcg"},
            "text_config": {
                "model_type": "deepseek_v41_text",
                "num_hidden_layers": layers,
                "hidden_size": 256,
                "moe_intermediate_size": 128,
                "n_routed_experts": experts,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "engram_layer_ids": [1],
                "engram_head_dim": 256,
                "num_nextn_predict_layers": 1,
                "dspark_n_routed_experts": draft_experts,
                "dspark_num_experts_per_tok": 1,
            },
        },
        {
            "embed.weight": ("BF16", (1024, 256)),
            "norm.weight": ("BF16", (256,)),
            "head.weight": ("BF16", (1024, 256)),
            "layers.1.engram.embed.weight": ("F8_E4M3", (1000, 256)),
            "layers.1.engram.embed.scale": ("F8_E8M0", (1000, 8)),
            "layers.1.engram.wkv.weight": ("F8_E4M3", (512, 256)),
            "mtp.0.main_proj.weight": ("BF16", (256, 256)),
            "mtp.0.ffn.gate.weight": ("F32", (draft_experts, 256)),
        },
    )
    words = ("w1", "w3", "w2")
    for layer in range(layers):
        model.tensors |= {
            f"layers.{layer}.attn.wq_a.weight": ("F8_E4M3", (128, 256)),
            f"layers.{layer}.attn.wo_b.weight": ("F8_E4M3", (256, 128)),
            f"layers.{layer}.attn_norm.weight": ("BF16", (256,)),
            f"layers.{layer}.hc_attn_fn": ("F32", (24, 1024)),
            f"layers.{layer}.ffn.gate.weight": ("F32", (experts, 256)),
        }
        for e in range(experts):
            model.tensors |= expert(f"layers.{layer}.ffn.experts.{e}", 256, 128, words)
    for e in range(draft_experts):
        model.tensors |= expert(f"mtp.0.ffn.experts.{e}", 256, 128, words)
    return model
