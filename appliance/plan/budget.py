"""The byte ledger: what one rank holds on its device and in host memory, line by line.

Only the trellises of experts ever move to the host. Their scales and markers, the address tables
and the counters stay on the device. Every line says where its number comes from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from appliance.checkpoint.linears import made_dense
from appliance.checkpoint.model import Checkpoint, MoeLayer
from appliance.plan.cards import Card
from appliance.plan.kernel_curve import H200, KernelCurve
from appliance.plan.kv import KvCost, kv_cache_bytes, kv_cost, kv_tokens, vocabulary
from appliance.plan.model import EXPERTS_IN, LedgerLine, expert_block_bytes
from appliance.plan.request import Policy
from appliance.plan.split import owned_experts, scale_bytes, share_of

MIB, GIB = 1 << 20, 1 << 30
Source = Literal["header", "formula", "measured", "setting"]

RESIDENT, SLOTS, ON_HOST = (*EXPERTS_IN["device"], *EXPERTS_IN["host"])
KV_CACHE = "KV cache"
TABLES = "lookup tables"

# nvidia-smi counts 95.59 GiB where torch sees 94.97 (RTX PRO 6000), 143771 MiB with 616 reserved
# on a recorded H200: the driver keeps this much for itself.
DRIVER_BYTES = 640 * MIB
# FACTS section 1, a peer's cards at TP 2: CUDA context, NCCL and library workspaces.
OUTSIDE_TORCH_BYTES = int(6.10 * GIB)
OUTSIDE_TORCH_ONE_RANK_BYTES = 2 * GIB
GRAPHS_BYTES = GIB // 2
# The same peer ran at 0.92 of the card.
RESERVE_SHARE = 0.08
# Prefill (expert_kernels.launch) streams host experts through a ring of this many blocks of one
# size, and has so many groups of so many rows begun at once: inputs of gate and up and the output
# of down in fp16, fp16 and float32, gate and up in float32, their product in fp16.
PREFILL_SLOTS = 24
PREFILL_WINDOW = 2
PREFILL_ROWS = 4096
# One engine process: interpreter, torch, libraries, its part of the API server.
HOST_PROCESS_BYTES = {"cuda": 4 * GIB, "cpu": 2 * GIB}
# Pages of the shard being read and of the one before stay cached: the reader drops what is farther
# behind (engine.behind). More than this the kernel takes back by itself where memory is short.
KEPT_SHARDS = 2
LOAD_WINDOW_BYTES = 8 * GIB
ADDRESS_BYTES_PER_EXPERT = 9 * 8
COUNTER_BYTES = 16  # picks, and where a cache slot is to be filled


@dataclass(frozen=True)
class Demand:
    """What is asked of every rank, with the planner's choices made: no None is left."""

    checkpoint: Checkpoint
    ranks: int
    expert_parallel: bool
    context_tokens: int
    kv_bytes: int
    policy: Policy
    device: Literal["cuda", "cpu"] = "cuda"
    curve: KernelCurve = H200

    @property
    def expert_ranks(self) -> int:
        """Ranks that cut each expert: 1 under expert parallelism."""
        return 1 if self.expert_parallel else self.ranks

    @cached_property
    def layers(self) -> tuple[MoeLayer, ...]:
        """MoE layers that are loaded: draft layers only when asked for."""
        kept = self.checkpoint.layers if self.policy.draft else self.checkpoint.target_layers
        return tuple(sorted(kept, key=lambda layer: (layer.draft, layer.index)))

    @cached_property
    def kv(self) -> KvCost:
        return kv_cost(self.checkpoint, self.ranks, float32=self.device == "cpu",
                       fp8=self.policy.kv_dtype == "fp8")  # fmt: skip

    @cached_property
    def largest_shard_bytes(self) -> int:
        ends: dict[str, int] = {}
        for tensor in self.checkpoint.tensors.values():
            ends[tensor.file] = max(ends.get(tensor.file, 0), tensor.stop)
        return max(ends.values(), default=0)

    @cached_property
    def linears(self) -> tuple[int, int]:
        """EXL3 matrices of the target beside routed experts, and the weights in them."""
        experts = tuple(f"{layer.prefix}." for layer in self.checkpoint.layers)
        shapes = [
            tensor.shape
            for name, tensor in self.checkpoint.tensors.items()
            if name.endswith(".trellis") and not name.startswith(experts)
        ]
        return len(shapes), sum(256 * shape[0] * shape[1] for shape in shapes)

    @cached_property
    def dense_weights(self) -> int:
        """Weights of the EXL3 matrices that are made dense at load, beside their stored form."""
        shapes = [self.checkpoint.tensors[name].shape for name in made_dense(self.checkpoint)]
        return sum(256 * shape[0] * shape[1] for shape in shapes)

    @property
    def on_node(self) -> frozenset[str]:
        """Lines of the ledger whose memory is bound to the memory node of the rank's card. Tables
        of int4 rows are ours (engine.tables); others lie where vLLM puts them."""
        ours = any(table.format == "int4" for table in self.checkpoint.tables)
        return frozenset({ON_HOST, TABLES} if ours else {ON_HOST})

    def block_bytes(self, layer: MoeLayer) -> int:
        return expert_block_bytes(layer.experts[0], self.expert_ranks)

    def owned(self, layer: MoeLayer, rank: int) -> range:
        return owned_experts(layer, rank, self.ranks, self.expert_parallel)


def device_lines(demand: Demand, card: Card) -> tuple[LedgerLine, ...]:
    """Everything on the device but the routed experts' trellises."""
    lines = [
        *_dense(demand, card.rank),
        _dense_copies(demand, card.rank),
        *_expert_extras(demand, card.rank),
        *_runtime(demand, card),
    ]
    return tuple(line for line in lines if line.size_bytes)


def host_lines(demand: Demand, card: Card) -> tuple[LedgerLine, ...]:
    """Everything in host memory but the routed experts' trellises."""
    rank, ranks, checkpoint = card.rank, demand.ranks, demand.checkpoint
    tables = sum(share_of(t.size_bytes, rank, ranks) for t in checkpoint.tables)
    process = demand.policy.host_reserve_bytes
    reserve = HOST_PROCESS_BYTES[card.device] if process is None else process
    window = min(KEPT_SHARDS * demand.largest_shard_bytes, LOAD_WINDOW_BYTES)
    lines = [
        _line(TABLES, "host", tables, "header",
              f"{len(checkpoint.tables)} tables, rows cut over {ranks} ranks", pinned=True),
        _line("load peak", "host", share_of(window, rank, ranks), "formula",
              "page cache of the two shards last read, at most 8 GiB on the machine"),
        _line("engine process and reserve", "host", reserve, "setting"),
    ]  # fmt: skip
    return tuple(line for line in lines if line.size_bytes)


def expert_lines(resident: int, slots: int, on_host: int, padding: int) -> tuple[LedgerLine, ...]:
    """The lines that placement decides; `padding` is what aligned blocks add to the trellises."""
    note = f"trellises; {padding:,} B of it pads blocks to 4 KiB" if padding else "trellises"
    return (
        _line(RESIDENT, "device", resident, "header", note),
        _line(SLOTS, "device", slots, "header", "trellises; each has its copy on the host"),
        _line(ON_HOST, "host", on_host, "header", note, pinned=True),
    )


def _dense(demand: Demand, rank: int) -> Iterator[LedgerLine]:
    for part in demand.checkpoint.dense:
        if part.role == "draft" and not demand.policy.draft:
            continue
        if part.tensor_parallel:
            size = share_of(part.size_bytes, rank, demand.ranks)
            note = f"cut over {demand.ranks} ranks" if demand.ranks > 1 else None
        else:
            size, note = part.size_bytes, "whole on every rank" if demand.ranks > 1 else None
        yield _line(part.role.replace("_", " "), "device", size, "header", note)


def _dense_copies(demand: Demand, rank: int) -> LedgerLine:
    size = share_of(2 * demand.dense_weights, rank, demand.ranks)
    return _line("made dense at load", "device", size, "formula",
                 "two bytes a weight of EXL3 matrices that vLLM reads as dense ones")  # fmt: skip


def _expert_extras(demand: Demand, rank: int) -> Iterator[LedgerLine]:
    scales = drafts = addresses = counters = 0
    for layer in demand.layers:
        owned = len(demand.owned(layer, rank))
        scales += owned * scale_bytes(layer.experts[0], demand.expert_ranks)
        addresses += owned * ADDRESS_BYTES_PER_EXPERT
        counters += len(layer.experts) * COUNTER_BYTES
        if layer.draft:
            drafts += owned * demand.block_bytes(layer)
    yield _line("expert scales and markers", "device", scales, "header", "never leave the device")
    yield _line("draft experts", "device", drafts, "header", "trellises; never leave the device")
    yield _line("address tables", "device", addresses, "formula", "9 x 8 B an expert")
    yield _line("routing counters", "device", counters, "formula", "16 B an expert")


def _runtime(demand: Demand, card: Card) -> Iterator[LedgerLine]:
    policy, kv = demand.policy, demand.kv
    yield _line(KV_CACHE, "device", demand.kv_bytes, kv.source,
                f"{_contexts(demand)} x {kv.bytes_per_token:,} B: {kv.note}")  # fmt: skip
    yield _line("activations", "device", activation_bytes(demand), "formula",
                f"a prefill chunk of {policy.prefill_chunk_tokens:,} tokens")  # fmt: skip
    if card.device == "cuda":
        many = demand.ranks > 1
        # The kernels keep a ring for each size of expert (expert_kernels.staging).
        blocks = sorted({demand.block_bytes(layer) for layer in demand.layers}, reverse=True)
        yield _line("prefill buffers", "device", PREFILL_SLOTS * sum(blocks), "formula",
                    f"{PREFILL_SLOTS} blocks of "
                    + " and of ".join(f"{block:,} B" for block in blocks))  # fmt: skip
        hidden, inner = demand.checkpoint.hidden_size, demand.checkpoint.intermediate_size
        row = 8 * hidden + 10 * (inner // demand.expert_ranks)
        yield _line("prefill scratch", "device", PREFILL_WINDOW * PREFILL_ROWS * row, "formula",
                    f"{PREFILL_WINDOW} x {PREFILL_ROWS:,} rows of {row:,} B")  # fmt: skip
        yield _line("CUDA graphs", "device", GRAPHS_BYTES, "setting")
        yield _line("outside torch", "device",
                    OUTSIDE_TORCH_BYTES if many else OUTSIDE_TORCH_ONE_RANK_BYTES,
                    "measured" if many else "setting",
                    "two RTX PRO 6000, measured by a peer" if many else "not measured")  # fmt: skip
        yield _line("driver", "device", DRIVER_BYTES, "measured", "RTX PRO 6000 and H200")
    reserve = policy.reserve_bytes
    if reserve is None:
        usable = card.capacity_bytes - DRIVER_BYTES
        reserve = int(max(0, usable) * RESERVE_SHARE) if card.device == "cuda" else 0
    yield _line("reserve", "device", reserve, "setting", "left free")


def _contexts(demand: Demand) -> str:
    """`12 x 262,144 tokens`, or `3,000,000 tokens` where that is no whole number of contexts."""
    tokens = kv_tokens(demand.kv, demand.kv_bytes)
    many = tokens // max(1, demand.context_tokens)
    exact = kv_cache_bytes(demand.kv, many * demand.context_tokens) == demand.kv_bytes
    return f"{many:,} x {demand.context_tokens:,} tokens" if exact else f"{tokens:,} tokens"


def activation_bytes(demand: Demand) -> int:
    """Peak of one forward pass over a prefill chunk, bf16, and the logits of every stream.

    Each token is gathered top_k times with its up and gate, beside four hidden vectors. Gives
    0.99 GiB for 8,192 tokens of DeepSeek-V4.1-Flash at TP 2, where a peer measured 1.04.
    """
    checkpoint, policy = demand.checkpoint, demand.policy
    hidden, inner = checkpoint.hidden_size, checkpoint.intermediate_size // demand.expert_ranks
    top_k = max((layer.top_k for layer in demand.layers), default=0)
    token = 2 * (top_k * (hidden + 2 * inner) + 4 * hidden)
    logits = 4 * policy.streams * vocabulary(checkpoint)
    return policy.prefill_chunk_tokens * token + logits


def _line(
    part: str,
    home: Literal["device", "host"],
    size: int,
    source: Source,
    note: str | None = None,
    pinned: bool = False,
) -> LedgerLine:
    return LedgerLine(
        part=part, home=home, size_bytes=size, source=source, note=note, pinned=pinned
    )
