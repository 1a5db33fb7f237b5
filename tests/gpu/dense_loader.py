"""Stock vLLM with the weights that an EXL3 checkpoint means, as far as they fit a measurement.

A plugin of its own that adds one load format: everything but the experts as the checkpoint has it,
experts drawn. vLLM's own random weights are so small that every logit ties: it would say its first
token for ever, which has no text, and every stream would pick the same experts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SPREAD = 0.02  # of the drawn weights: what a trained model has, about


def register() -> None:
    """Called by vLLM in each of its processes."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("dense_twin")
    class DenseTwin(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            device = next(model.parameters()).device
            tensors = dense_tensors(Path(os.environ["DENSE_SOURCE"]), str(device))
            model.load_weights(tensors.items())
            for name, parameter in model.named_parameters():
                if ".experts." in name:
                    parameter.data.uniform_(-SPREAD, SPREAD)


def dense_tensors(source: Path, device: str) -> dict[str, Any]:
    """Name -> tensor of everything but the experts, without EXL3."""
    from safetensors import safe_open

    from appliance.engine.dense_twin import _dense

    files = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in sorted(set(files.values())):
        with safe_open(source / file, "pt", device=device) as shard:
            names = [name for name in shard.keys() if ".experts." not in name]  # noqa: SIM118
            found |= {name: shard.get_tensor(name) for name in names}
    return _dense(found)
