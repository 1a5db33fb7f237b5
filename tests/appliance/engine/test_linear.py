"""What each rank takes of an EXL3 linear, whichever of vLLM's classes it belongs to."""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from appliance.engine.linear import Exl3LinearMethod
from expert_kernels import reference

pytestmark = pytest.mark.engine
K, N, RANKS = 256, 512, 2


def linear(kind: type[Any], rank: int, **facts: int) -> Any:
    """vLLM's own module of one rank of two, without the process group that its constructor asks."""
    layer = object.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.tp_rank, layer.tp_size = rank, RANKS
    for name, value in facts.items():
        setattr(layer, name, value)
    return layer


def stored(k: int, n: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "trellis": torch.randint(-(2**15), 2**15, (k // 16, n // 16, 48), dtype=torch.int16,
                                 generator=generator),
        "suh": torch.randn(k, generator=generator).half(),
        "svh": torch.randn(n, generator=generator).half(),
    }  # fmt: skip


def share(
    layer: Any,
    inputs: int,
    outputs: list[int],
    whole: tuple[int, int],
    parts: list[dict[str, torch.Tensor]],
    x: torch.Tensor,
) -> torch.Tensor:
    """Build, load and run it as vLLM does: sizes of this rank, then whole tensors."""
    method = Exl3LinearMethod("a.linear")
    method.create_weights(layer, inputs, outputs, whole[0], whole[1], torch.float32)
    for index, tensors in enumerate(parts):
        for kind, tensor in tensors.items():
            parameter = getattr(layer, kind)
            parameter.weight_loader(parameter, tensor, index if len(parts) > 1 else None)
    method.process_weights_after_loading(layer)
    return method.apply(layer, x)


def dense(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return reference.dequantise(tensors["trellis"], tensors["suh"], tensors["svh"], "3inst")


def close(found: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((found - right).norm() <= 1e-5 * right.norm()) and found.shape == right.shape


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_replicated_linear_is_whole_on_every_rank(rank: int) -> None:
    """DeepSeek's indexer has one (wq_b): it is never split, and has the rank of its process."""
    x, tensors = torch.randn(3, K), stored(K, N, 1)
    y = share(linear(ReplicatedLinear, rank), K, [N], (K, N), [tensors], x)
    assert close(y, x @ dense(tensors))


def test_inputs_that_are_split_add_up_over_ranks() -> None:
    x, tensors = torch.randn(3, K), stored(K, N, 2)
    half = K // RANKS
    ys = [
        share(linear(RowParallelLinear, rank), half, [N], (K, N), [tensors],
              x[:, rank * half : (rank + 1) * half])
        for rank in range(RANKS)
    ]  # fmt: skip
    assert close(ys[0] + ys[1], x @ dense(tensors))


def test_outputs_of_merged_parts_are_split_part_by_part() -> None:
    x, parts = torch.randn(3, K), [stored(K, 256, 3), stored(K, 512, 4)]
    ys = [
        share(linear(MergedColumnParallelLinear, rank), K, [128, 256], (K, 768), parts, x)
        for rank in range(RANKS)
    ]
    for at, width, tensors in ((0, 128, parts[0]), (128, 256, parts[1])):
        found = torch.cat([y[:, at : at + width] for y in ys], dim=1)
        assert close(found, x @ dense(tensors))


def test_fewer_key_heads_than_ranks_are_held_by_several() -> None:
    """One key and value head of 128, two ranks: each has its half of q, and all of k and v."""
    x, parts = torch.randn(3, K), [stored(K, 512, 5), stored(K, 128, 6), stored(K, 128, 7)]
    for rank in range(RANKS):
        layer = linear(QKVParallelLinear, rank, num_kv_head_replicas=2)
        y = share(layer, K, [256, 128, 128], (K, 1024), parts, x)
        q = (x @ dense(parts[0]))[:, rank * 256 : (rank + 1) * 256]
        right = torch.cat([q, x @ dense(parts[1]), x @ dense(parts[2])], dim=1)
        assert close(y, right)


def test_outputs_that_end_inside_a_block_of_128_are_decoded_with_the_whole_block() -> None:
    """192 outputs a rank: rank 1 starts and rank 0 ends in the middle of a Hadamard block."""
    x, tensors = torch.randn(3, K), stored(K, 384, 8)
    ys = [
        share(linear(MergedColumnParallelLinear, rank), K, [192], (K, 384), [tensors], x)
        for rank in range(RANKS)
    ]
    assert close(torch.cat(ys, dim=1), x @ dense(tensors))
