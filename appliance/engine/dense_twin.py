"""The same model without EXL3, for loaders that know none of it: what its tensors mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

MARKERS = ("mcg", "mul1")


def write_dense_twin(source: Path, out: Path) -> None:
    """The same model in `out` as float32 tensors, without EXL3: for stock loaders.

    Needs about 4 bytes of memory and of disk for every weight.
    """
    from safetensors.torch import save_file

    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json", fix="the folder of a checkpoint")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config["torch_dtype"] = "float32"
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / name).is_file():
            (out / name).write_bytes((source / name).read_bytes())
    save_file(_dense(_tensors(source)), out / "model.safetensors", metadata={"format": "pt"})


def _tensors(source: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{source} holds no *.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _dense(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from expert_kernels.reference import dequantise

    dense = {}
    linears = [name.removesuffix(".trellis") for name in tensors if name.endswith(".trellis")]
    for name in linears:
        trellis, suh, svh = (tensors.pop(f"{name}.{part}") for part in ("trellis", "suh", "svh"))
        marker = [m for m in MARKERS if tensors.pop(f"{name}.{m}", None) is not None]
        weight = dequantise(trellis, suh, svh, marker[0] if marker else "3inst")
        dense[f"{name}.weight"] = weight.T.contiguous()
    return dense | {name: tensor.float() for name, tensor in tensors.items()}
