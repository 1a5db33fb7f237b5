"""Make a small valid EXL3 checkpoint that vLLM can serve. Weights need no package at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from appliance.checkpoint.synth import (
    blocks,
    deepseek_v3,
    glm4_moe,
    mixtral,
    qwen3_moe,
    tokenizer,
    v41_thin,
)
from appliance.checkpoint.synth.parts import Part
from appliance.checkpoint.synth.spec import SynthSpec
from appliance.checkpoint.synth.write import Progress, new_folder, write_json, write_shards

FAMILIES: dict[str, ModuleType] = {
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "glm4_moe": glm4_moe,
    "mixtral": mixtral,
    "deepseek_v41": v41_thin,
}
EXL3_VERSION = "1.6.5"  # the exllamav3 whose files these resemble


def synthesize(out: Path, spec: SynthSpec, *, progress: Progress | None = None) -> None:
    """Write a checkpoint into the new folder `out`: config, index, shards, tokenizer.

    The same spec gives the same bytes. `progress` gets (what, done, total), of weights in bytes.
    A run that is killed leaves no `out`. Raises UsageError if `out` exists and is not empty.
    """
    family = FAMILIES[spec.family]
    with new_folder(out) as folder:
        if progress is not None:
            progress("tokenizer", 0, 1)
        text, quiet = tokenizer.train(spec.vocab_size)
        tokenizer.write(folder, text, blocks.CONTEXT)
        if progress is not None:
            progress("tokenizer", 1, 1)
        parts: list[Part] = list(family.parts(spec, quiet))
        config = family.config(spec) | {"quantization_config": quantization(spec, parts)}
        write_json(folder / "config.json", config)
        write_shards(folder, parts, shards=spec.shards, seed=spec.seed, progress=progress)


def quantization(spec: SynthSpec, parts: Sequence[Part]) -> dict[str, object]:
    """EXL3's block of config.json; `bits` is the mean over EXL3 weights other than the head."""
    trellises = [p for p in parts if p.name.endswith(".trellis") and p.name != "lm_head.trellis"]
    weights = sum(p.shape[0] * 16 * p.shape[1] * 16 for p in trellises)
    block: dict[str, object] = {
        "quant_method": "exl3",
        "version": EXL3_VERSION,
        "bits": round(8 * sum(p.size_bytes for p in trellises) / weights, 2),
        "codebook": spec.codebook,
        "out_scales": "always",
    }
    if spec.dense_format == "fp8":
        block["non_routed_quantization"] = v41_thin.NON_ROUTED
    if spec.quantise_head and any(p.name == "lm_head.trellis" for p in parts):
        block["head_bits"] = spec.head_bits
    return block
