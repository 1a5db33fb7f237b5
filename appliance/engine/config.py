"""Which method each module of the model gets: experts, EXL3 linear, or vLLM's own."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.engine import compat

METHOD = "exl3"


@lru_cache(maxsize=1)
def checkpoint_of(path: str) -> Checkpoint:
    """The checkpoint's headers, read once per process."""
    return read_checkpoint(Path(path))


class Exl3Config(compat.QuantizationConfig):
    """`quantization_config.quant_method == "exl3"`: config.json selects us, no flag needed.

    Whether a module is EXL3 is read from the stored names, never from `bits` or a list in the
    configuration: a module with a `.trellis` is EXL3, anything else is what vLLM makes of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear_names: frozenset[str] = frozenset()

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quantization_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exl3Config:
        return cls()

    def maybe_update_config(self, model_name: str, **_: Any) -> None:
        """vLLM's hook after construction: here the model's folder is known."""
        checkpoint = checkpoint_of(str(model_name))
        expert_prefixes = tuple(layer.prefix + "." for layer in checkpoint.layers)
        self.linear_names = frozenset(
            name.removesuffix(".trellis")
            for name in checkpoint.tensors
            if name.endswith(".trellis") and not name.startswith(expert_prefixes)
        )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """vLLM renames modules; our list of EXL3 modules follows."""
        self.linear_names = frozenset(hf_to_vllm_mapper.apply_list(sorted(self.linear_names)))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        from appliance.engine.experts import ExpertsMethod
        from appliance.engine.linear import Exl3LinearMethod

        if isinstance(layer, compat.RoutedExperts):
            return ExpertsMethod(layer, prefix)
        if isinstance(layer, compat.LinearBase | compat.ParallelLMHead) and self._is_exl3(prefix):
            return Exl3LinearMethod(prefix)
        if isinstance(layer, compat.LinearBase):
            return compat.UnquantizedLinearMethod()
        return None

    def _is_exl3(self, prefix: str) -> bool:
        """A merged module (qkv_proj) is ours when any of its stored parts is EXL3."""
        parent, _, leaf = prefix.rpartition(".")
        merged = {**compat.MERGED_MODULES, **self.packed_modules_mapping}
        parts = merged.get(leaf, [leaf])
        return any((f"{parent}.{part}" if parent else part) in self.linear_names for part in parts)
