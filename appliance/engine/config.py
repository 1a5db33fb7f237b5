"""Which method each module of the model gets: experts, EXL3 linear, or vLLM's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.engine import compat

METHOD = "exl3"
V41 = "deepseek_v41"


@lru_cache(maxsize=1)
def checkpoint_of(path: str) -> Checkpoint:
    """The checkpoint's headers, read once per process."""
    return read_checkpoint(Path(path))


class Exl3Config(compat.QuantizationConfig):
    """`quantization_config.quant_method == "exl3"`: config.json selects us, no flag needed.

    Whether a module is EXL3 is read from the stored names, never from `bits` or a list in the
    configuration: a module with a `.trellis` is EXL3, one with a `.scale` beside its weight is what
    `non_routed_quantization` says, anything else is plain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear_names: frozenset[str] = frozenset()
        self.scaled_names: frozenset[str] = frozenset()
        self.rest: Any = None  # vLLM's own configuration for the scaled ones

    @property
    def weight_block_size(self) -> list[int] | None:
        """vLLM's model classes ask for it, and lay out scales of linears by it."""
        block: list[int] | None = getattr(self.rest, "weight_block_size", None)
        return block

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
        experts = tuple(layer.prefix + "." for layer in checkpoint.layers)
        tables = tuple(table.name.removesuffix("weight") for table in checkpoint.tables)
        dense = [name for name in checkpoint.tensors if not name.startswith((*experts, *tables))]
        rename = compat.v41_module if checkpoint.model_type == V41 else str
        self.linear_names = frozenset(_stems(dense, ".trellis", rename))
        self.scaled_names = frozenset(_stems(dense, ".scale", rename))
        quantization: Any = checkpoint.config.get("quantization_config")
        rest = quantization.get("non_routed_quantization") if quantization else None
        if self.scaled_names:
            if rest is None:
                raise ValueError(
                    f"{len(self.scaled_names)} linears of {checkpoint.path} have scales "
                    f"({min(self.scaled_names)}), and its config.json does not say what they are. "
                    "Try: quantization_config.non_routed_quantization as the release has it"
                )
            self.rest = compat.non_routed(checkpoint.model_type, rest)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """vLLM renames modules; our list of EXL3 modules follows."""
        for names in ("linear_names", "scaled_names"):
            mapped = hf_to_vllm_mapper.apply_list(sorted(getattr(self, names)))
            setattr(self, names, frozenset(mapped))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        from appliance.engine.experts import ExpertsMethod
        from appliance.engine.linear import Exl3LinearMethod

        if isinstance(layer, compat.RoutedExperts):
            return ExpertsMethod(layer, prefix)
        linear = isinstance(layer, compat.LinearBase)
        if (linear or isinstance(layer, compat.ParallelLMHead)) and self._has(
            prefix, self.linear_names
        ):
            return Exl3LinearMethod(prefix)
        if linear and self.rest is not None and self._has(prefix, self.scaled_names):
            return self.rest.get_quant_method(layer, prefix)
        return compat.UnquantizedLinearMethod() if linear else None

    def _has(self, prefix: str, names: frozenset[str]) -> bool:
        """A merged module (qkv_proj) is of a kind when any of its stored parts is."""
        parent, _, leaf = prefix.rpartition(".")
        merged = {**compat.MERGED_MODULES, **self.packed_modules_mapping}
        parts = merged.get(leaf, [leaf])
        return any((f"{parent}.{part}" if parent else part) in names for part in parts)


def _stems(names: Iterable[str], suffix: str, rename: Callable[[str], str]) -> Iterator[str]:
    return (rename(name.removesuffix(suffix)) for name in names if name.endswith(suffix))
