"""How ranks share a layer's experts, byte for byte.

Tensor parallelism cuts every expert: gate and up along n (suh whole, svh cut), down along k (suh
cut, svh whole). Expert parallelism gives each rank whole experts, in contiguous runs as vLLM's
linear placement does.
"""

from __future__ import annotations

from appliance.checkpoint.model import ExpertShape, MoeLayer


def share_of(size: int, rank: int, ranks: int) -> int:
    """Rank's part of `size` bytes cut over ranks; the parts add up to `size` exactly."""
    return size * (rank + 1) // ranks - size * rank // ranks


def owned_experts(layer: MoeLayer, rank: int, ranks: int, expert_parallel: bool) -> range:
    """Global ids of the experts of which this rank holds bytes."""
    if not expert_parallel:
        return range(len(layer.experts))
    each = len(layer.experts) // ranks
    return range(rank * each, (rank + 1) * each)


def scale_bytes(shape: ExpertShape, tensor_parallel: int) -> int:
    """Scales, biases and codebook markers of one expert on one rank: never on the host."""
    total = sum(p.marker_bytes for p in shape.projections)
    for p in (shape.gate, shape.up):
        total += 2 * (p.k + p.n // tensor_parallel) + p.bias_bytes // tensor_parallel
    down = shape.down
    return total + 2 * (down.k // tensor_parallel + down.n) + down.bias_bytes
