"""A lookup table of int4 rows in host memory, in the place of vLLM's FP8 one.

A row is 144 bytes, 128 of values and 16 of scales (expert_kernels.lookup), in one mapping on the
node of this rank's GPU, pinned. Ranks divide the hash heads as vLLM does, so each holds the rows of
its own heads. vLLM asks for the rows ahead of the layers, on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from random import Random

import torch

from appliance.checkpoint.model import Checkpoint
from appliance.checkpoint.safetensors import read_bytes
from appliance.engine.hostmem import HostMapping, Node
from appliance.engine.linear import placeholder
from appliance.engine.pinning import CHUNK_BYTES, Pinned, chunks
from expert_kernels.lookup import GROUP, ROW_BYTES, VALUES, RowTable, lookup

# What a stored tensor is, and its bytes of a row: the kernel reads both at once.
PARTS = {
    "weight": (torch.uint8, VALUES // 2, slice(0, VALUES // 2)),
    "scale": (torch.float16, VALUES // GROUP, slice(VALUES // 2, ROW_BYTES["int4"])),
}
SAMPLES = 4


class Int4Table(torch.nn.Module):
    """What vLLM's Engram asks of its `embed_tokens` (ParallelEngramEmbedding of vLLM 0.33.0).

    `head_sizes`: rows of every hash head, in order; `stored`: the name of the checkpoint's tensor,
    for messages and proof; `rank` of `ranks` holds its share of the heads. Raises ValueError for a
    table that int4 rows cannot hold, HostMemoryError where there is no memory for it.
    """

    cpu_offload = True  # rows are fetched ahead, on a stream of their own
    dp_size = 1

    def __init__(
        self,
        head_sizes: Sequence[int],
        dim: int,
        stored: str,
        device: torch.device,
        *,
        rank: int = 0,
        ranks: int = 1,
        node: Node | None = None,
    ) -> None:
        super().__init__()
        heads = -(-len(head_sizes) // ranks)
        if dim != VALUES or (ranks - 1) * heads >= len(head_sizes):
            raise ValueError(
                f"{stored}: rows of {dim} values over {len(head_sizes)} hash heads and {ranks} "
                f"ranks; int4 rows have {VALUES}, and each rank needs a head"
            )
        starts = [*accumulate(head_sizes, initial=0)]
        self.dim, self.tp_size, self.stored = dim, ranks, stored
        self.n_hash_cols, self.part_n_hash_cols, self.head_start = (
            len(head_sizes),
            heads,
            rank * heads,
        )
        self.first = starts[self.head_start]
        self.count = starts[min(self.head_start + heads, len(head_sizes))] - self.first
        size = self.count * ROW_BYTES["int4"]
        self.mapping = HostMapping(size, node=node)
        self.pinned: Pinned | None = None
        if device.type != "cpu":
            pieces = chunks(range(0, size, CHUNK_BYTES), size)
            self.pinned = Pinned(self.mapping.address, pieces)
        self.rows = torch.frombuffer(self.mapping.view(0, size), dtype=torch.uint8)
        self.rows = self.rows.view(self.count, ROW_BYTES["int4"])
        self.table = RowTable(self.mapping.address, self.count, "int4")
        self.missing = set(PARTS)
        # The names that vLLM's mapper gives to `embed.weight` and `embed.scale`.
        for name, part in (("weight", "weight"), ("weight_scale_inv", "scale")):
            self.register_parameter(name, placeholder(partial(self._load, part), PARTS[part][0]))

    def _load(self, part: str, parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
        """Copy this rank's rows of a stored tensor, values or scales, to their places."""
        dtype, columns, place = PARTS[part]
        end = self.first + self.count
        if (
            loaded.dtype != dtype
            or loaded.ndim != 2
            or loaded.shape[1] != columns
            or len(loaded) < end
        ):
            raise ValueError(
                f"{self.stored}: its {part} is {loaded.dtype} {list(loaded.shape)}; int4 rows need "
                f"{dtype} of {columns} columns, and {end:,} rows at least"
            )
        self.rows[:, place].copy_(loaded[self.first : end].view(torch.uint8))
        self.missing.discard(part)

    def lookup(self, indices: torch.Tensor, out: torch.Tensor, background: bool = False) -> None:
        """Rows of this rank's heads into `out` [tokens, heads of this rank, 256], bf16.

        indices int [tokens, heads of all ranks]: row numbers of the whole table, -1 for none. Heads
        that only fill up the last rank's share give zeros. `background` is vLLM's and changes
        nothing: this kernel takes what it needs.
        """
        if self.missing:
            raise ValueError(f"{self.stored}: the table came without {', '.join(self.missing)}")
        if not len(indices):
            return
        mine = indices[:, self.head_start : self.head_start + self.part_n_hash_cols].long()
        ids = torch.where(
            (mine >= self.first) & (mine < self.first + self.count), mine - self.first, -1
        )
        short = self.part_n_hash_cols - ids.shape[1]
        if short:
            ids = torch.nn.functional.pad(ids, (0, short), value=-1)
        out.copy_(lookup(ids, self.table, out.dtype))

    def collapse_huge_pages(self) -> None:
        """vLLM's request for its own pages; the mapping has asked for huge ones already."""

    def differences(self, checkpoint: Checkpoint, seed: int = 0) -> Iterator[str]:
        """Sentences about rows whose live bytes are not the shards': first, last, some between."""
        base = self.stored.removesuffix("weight")
        stored = {part: checkpoint.tensors[base + part] for part in PARTS}
        between = Random(seed).sample(range(self.count), min(SAMPLES, self.count))
        for row in sorted({0, self.count - 1, *between}):
            right = bytearray()
            for tensor in stored.values():
                width = tensor.size_bytes // tensor.shape[0]
                start = tensor.start + (self.first + row) * width
                right += read_bytes(
                    checkpoint.path, replace(tensor, start=start, stop=start + width)
                )
            if bytes(self.rows[row].numpy()) != bytes(right):
                yield f"{self.stored}: live row {self.first + row:,} is not the shard's"

    def close(self) -> None:
        """Unregister and unmap. Nobody may read the table any more."""
        del self.rows
        if self.pinned is not None:
            self.pinned.close()
        self.mapping.close()
