"""EXL3 linear layers and the head: stored parts of a merged module stay apart, each its own EXL3
matrix (or a plain one, where a package left it unquantised)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from appliance.engine import compat
from expert_kernels import codec, ops, reference

TENSOR_KINDS = {
    "trellis": torch.int16,
    "suh": torch.float16,
    "svh": torch.float16,
    "su": torch.int16,
    "sv": torch.int16,
    "mcg": torch.int32,
    "mul1": torch.int32,
}
HADAMARD = 128


def placeholder(loader: Any, dtype: torch.dtype) -> torch.nn.Parameter:
    """A Parameter of no elements: it gives vLLM's loaders a name and a `weight_loader` to call.

    The real tensors are plain attributes, so offloaders, sleep mode and device moves, which walk
    over Parameters, do not see them.
    """
    parameter = torch.nn.Parameter(torch.empty(0, dtype=dtype, device="cpu"), requires_grad=False)
    compat.set_weight_attrs(parameter, {"weight_loader": loader})
    return parameter


def codebook_of(kinds: set[str]) -> str:
    """The marker's presence selects the codebook; none is the default one (FACTS section 2)."""
    return "mcg" if "mcg" in kinds else "mul1" if "mul1" in kinds else "3inst"


@dataclass
class Part:
    """One stored matrix: this rank takes `rows` of its inputs and `columns` of its outputs."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    output_size: int  # of this rank, padding included
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class Exl3LinearMethod(compat.LinearMethodBase):
    """y = x @ W for each stored part, side by side. One instance per module."""

    requires_device_loading = False  # there are no Parameters to move

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.parts: list[Part] = []

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        rank = int(getattr(layer, "tp_rank", 0))
        start = rank * input_size_per_partition if input_size_per_partition != input_size else 0
        rows = (start, start + input_size_per_partition)
        if rows[0] % HADAMARD or rows[1] % HADAMARD:
            raise ValueError(
                f"{self.prefix}: inputs {rows[0]}..{rows[1]} of {input_size} on this rank do not "
                "start and end at a multiple of 128, which EXL3's Hadamard blocks need. Try: "
                "fewer tensor-parallel ranks"
            )
        # Replicated linears have a rank, too: that they are not split is told by the sizes alone.
        whole = sum(output_partition_sizes) == output_size
        self.parts = [
            Part(rows, self._columns(layer, index, size, whole), size)
            for index, size in enumerate(output_partition_sizes)
        ]
        self.device = torch.empty(0).device  # vLLM's loader sets the default device
        for kind, dtype in {**TENSOR_KINDS, "weight": params_dtype}.items():
            layer.register_parameter(kind, placeholder(partial(self._load, kind), dtype))

    def _columns(
        self, layer: torch.nn.Module, index: int, size: int, whole: bool
    ) -> tuple[int, int]:
        """This rank's outputs of part `index`, as stored; `whole`: every rank has all of them."""
        if isinstance(layer, compat.ParallelLMHead):
            shard = layer.shard_indices
            return (shard.org_vocab_start_index, shard.org_vocab_end_index)
        if whole:
            return (0, size)
        rank = layer.tp_rank
        if isinstance(layer, compat.QKVParallelLinear) and index > 0:
            rank //= layer.num_kv_head_replicas
        return (rank * size, (rank + 1) * size)

    def _load(
        self,
        kind: str,
        parameter: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        shard: Any = None,
    ) -> None:
        """vLLM's loaders give the shard positionally or as an attribute of the tensor."""
        shard = getattr(loaded_weight, "shard_id", None) if shard is None else shard
        index = {None: 0, "q": 0, "k": 1, "v": 2}.get(shard, shard)
        part = self.parts[index]
        sliced = _slice(kind, loaded_weight, part)
        part.tensors[kind] = sliced.to(self.device, copy=True).contiguous()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        for index, part in enumerate(self.parts):
            for packed, plain in (("su", "suh"), ("sv", "svh")):
                if packed in part.tensors:
                    part.tensors[plain] = codec.unpack_signs(part.tensors.pop(packed))
            needed = {"weight"} if "weight" in part.tensors else {"trellis", "suh", "svh"}
            missing = sorted(needed - set(part.tensors))
            if missing:
                raise ValueError(
                    f"{self.prefix}: part {index} came without {', '.join(missing)}; "
                    "the checkpoint is incomplete"
                )
        if getattr(layer, "is_bmm", False):  # DeepSeek-V4 reads the weight of wo_a itself
            (part,) = self.parts
            layer.weight = torch.nn.Parameter(_dense(part), requires_grad=False)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        y = _multiply(x, self.parts)
        return y if bias is None else y + bias


def _slice(kind: str, tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """This rank's share of a stored tensor. Outputs are widened to whole Hadamard blocks."""
    low, high = part.rows
    left = part.columns[0] // HADAMARD * HADAMARD
    right = -(-part.columns[1] // HADAMARD) * HADAMARD
    match kind:
        case "trellis":
            return tensor[low // 16 : high // 16, left // 16 : right // 16]
        case "suh":
            return tensor[low:high]
        case "svh":
            return tensor[left:right]
        case "su":
            return tensor[low // 16 : high // 16]
        case "sv":
            return tensor[left // 16 : right // 16]
        case "weight":
            return tensor[part.columns[0] : part.columns[1], low:high]
        case _:
            return tensor


def _dense(part: Part) -> torch.Tensor:
    """A part as a plain bf16 weight [outputs, inputs]."""
    tensors = part.tensors
    if "weight" in tensors:
        return tensors["weight"].to(torch.bfloat16)
    kinds = (tensors["trellis"], tensors["suh"], tensors["svh"])
    skip = part.columns[0] % HADAMARD
    dense = reference.dequantise(*kinds, codebook_of(set(tensors))).T
    wanted = dense[skip : skip + part.columns[1] - part.columns[0]]
    return wanted.to(torch.bfloat16).contiguous()


def _multiply(x: torch.Tensor, parts: list[Part]) -> torch.Tensor:
    """All parts' outputs side by side: matrices that agree in one call, other parts one by one."""
    codebooks = {codebook_of(set(part.tensors)) for part in parts if "weight" not in part.tensors}
    apart = len(codebooks) > 1 or any(
        "weight" in p.tensors or p.output_size != p.columns[1] - p.columns[0] for p in parts
    )
    if apart and len(parts) > 1:
        return torch.cat([_multiply(x, [part]) for part in parts], dim=-1)
    if "weight" in parts[0].tensors:
        y = torch.nn.functional.linear(x, parts[0].tensors["weight"].to(x.dtype))
    else:
        tensors = [part.tensors[kind] for part in parts for kind in ("trellis", "suh", "svh")]
        columns = [c - p.columns[0] + p.columns[0] % HADAMARD for p in parts for c in p.columns]
        # One opaque op on a GPU: a compiler cannot follow addresses. On a CPU it can follow torch.
        op = torch.ops.vllm.appliance_linear if x.is_cuda else _linear
        y = op(x, tensors, columns, codebooks.pop())
    short = sum(part.output_size for part in parts) - y.shape[-1]
    return torch.nn.functional.pad(y, (0, short)) if short else y


def _linear(
    x: torch.Tensor, tensors: list[torch.Tensor], columns: list[int], codebook: str
) -> torch.Tensor:
    """`ops.linear` in an op's types: trellis, suh, svh and start, end of each matrix in turn."""
    matrices = [
        ops.Matrix(trellis, suh, svh, codebook, (start, end))
        for trellis, suh, svh, start, end in zip(
            *(tensors[i::3] for i in range(3)), columns[::2], columns[1::2], strict=True
        )
    ]
    return ops.linear(x, matrices)


def _linear_fake(
    x: torch.Tensor, tensors: list[torch.Tensor], columns: list[int], codebook: str
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sum(columns[1::2]) - sum(columns[::2])))


compat.register_op("appliance_linear", _linear, _linear_fake)
