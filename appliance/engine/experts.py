"""The MoE method: each expert goes straight to its home, one table of addresses a layer."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

from appliance.engine import compat
from appliance.engine.config import checkpoint_of
from appliance.engine.linear import TENSOR_KINDS, placeholder
from appliance.engine.rank import LiveLayer, open_state, state
from appliance.plan.model import format_ids
from expert_kernels import codec, ops
from expert_kernels.cuda import prepare

PROJECTIONS = {"w1": 0, "w3": 1, "w2": 2}  # gate, up, down
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class ExpertsMethod(compat.FusedMoEMethodBase):
    """vLLM's seam for routed experts. `moe_kernel` stays None: the runner reduces over ranks."""

    requires_device_loading = False

    def __init__(self, layer: Any, prefix: str) -> None:
        super().__init__(layer.moe_config)
        found = _LAYER.search(prefix)
        if found is None:
            raise ValueError(f"{prefix}: no layer number in the name of a module with experts")
        self.prefix = prefix
        self.index = int(found.group(1))

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        parallel = layer.moe_config.moe_parallel_config
        rank, ranks = (
            (parallel.ep_rank, parallel.ep_size)
            if parallel.use_ep
            else (parallel.tp_rank, parallel.tp_size)
        )
        device = torch.empty(0).device  # vLLM's loader sets the default device
        self.state = open_state(rank, ranks, device)
        self.shape = self.state.arena.layer(self.index)
        self._refuse_what_is_not_right(layer, params_dtype)
        locals_ = (layer._map_global_expert_id_to_local_expert_id(e) for e in self._all())
        self.local = {e: row for e, row in zip(self._all(), locals_, strict=True) if row >= 0}
        self.hidden, self.intermediate = hidden_size, intermediate_size_per_partition
        self.scales = torch.zeros(
            num_experts * self._scales_of_one(), dtype=torch.float16, device=device
        )
        self.seen: dict[int, set[tuple[int, str]]] = {e: set() for e in self.local}
        for stem in ("w13", "w2"):
            for kind, dtype in TENSOR_KINDS.items():
                layer.register_parameter(
                    f"{stem}_{kind}", placeholder(partial(self._load, kind), dtype)
                )

    def _all(self) -> range:
        return range(len(self.shape.experts))

    def _scales_of_one(self) -> int:
        return 3 * (self.hidden + self.intermediate)

    def _refuse_what_is_not_right(self, layer: Any, dtype: torch.dtype) -> None:
        here = len(self.shape.experts)
        checkpoint = checkpoint_of(compat.appliance_settings()["checkpoint"])
        problem = compat.wrong_in(dtype, checkpoint.model_type, checkpoint.config) or (
            "experts replicated over ranks (EPLB)"
            if layer.moe_config.moe_parallel_config.enable_eplb
            else f"the activation {layer.activation.value}"
            if layer.activation.value != "silu"
            else f"{layer.global_num_experts} experts where the checkpoint has {here}"
            if layer.global_num_experts != here
            else None
        )
        if problem is not None:
            raise ValueError(f"{self.prefix}: {problem}: not supported by this engine")

    def _load(
        self,
        kind: str,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """vLLM hands over one stored tensor of one expert: copy this rank's share to its home."""
        mine = expert_id in self.local
        projection = PROJECTIONS[shard_id]
        word = self.shape.projection_names[projection]
        self.state.behind.reached(f"{self.shape.prefix}.{expert_id}.{word}.{kind}")
        if mine:
            if kind == "trellis":
                self.state.arena.write(self.index, expert_id, projection, loaded_weight)
            elif kind in ("suh", "svh", "su", "sv"):
                packed = kind in ("su", "sv")
                values = codec.unpack_signs(loaded_weight) if packed else loaded_weight
                kind = {"su": "suh", "sv": "svh"}.get(kind, kind)
                share = self.state.arena.shard.scale(projection, kind, values)
                start = self._scale_offset(self.local[expert_id], projection, kind)
                self.scales[start : start + share.numel()].copy_(share)
            self.seen[expert_id].add((projection, kind))
        return mine if return_success else None

    def _scale_offset(self, row: int, projection: int, kind: str) -> int:
        """Elements before one scale vector in the flat buffer [row][gate|up|down][suh|svh]."""
        inputs = self.intermediate if projection == 2 else self.hidden
        before = projection * (self.hidden + self.intermediate)
        return row * self._scales_of_one() + before + (inputs if kind == "svh" else 0)

    def process_weights_after_loading(self, layer: Any) -> None:
        needed = {(p, kind) for p in range(3) for kind in ("trellis", "suh", "svh")}
        for expert, seen in self.seen.items():
            if needed - seen:
                p, kind = min(needed - seen)
                word = self.shape.projection_names[p]
                raise ValueError(f"{self.prefix}: expert {expert} came without {word}.{kind}")
        del self.seen
        self.state.behind.finished()
        live = self._live_layer(layer)
        if live.counters is not None:  # all scratch now: vLLM gives what is left to the KV cache
            prepare(live.table, layer.moe_config.experts_per_token)
        self.state.live[self.index] = live
        self.state.by_name[self.prefix] = live

    def _live_layer(self, layer: Any) -> LiveLayer:
        arena, base = self.state.arena, self.scales.data_ptr()
        rows = sorted(self.local, key=self.local.__getitem__)
        if rows != self.state.book.rows[self.index]:
            raise ValueError(
                f"{self.prefix}: this rank has experts {format_ids(rows)} and the plan gives it "
                f"{format_ids(self.state.book.rows[self.index])}. Try: make the plan again"
            )
        addresses = [
            [
                [trellis] + [base + 2 * self._scale_offset(row, p, kind) for kind in ("suh", "svh")]
                for p, trellis in enumerate(arena.trellis_addresses(self.index, expert))
            ]
            for row, expert in enumerate(rows)
        ]
        one = self.shape.experts[rows[0]]
        host, device = arena.pools["host"], self.scales.device
        table = self.state.book.table(self.index)
        table.copy_(torch.tensor(addresses, dtype=torch.int64))
        return LiveLayer(
            shape=self.shape,
            table=ops.ExpertTable(
                addresses=table,
                hidden_size=self.hidden,
                intermediate_size=self.intermediate,
                bits=(one.gate.bits, one.up.bits, one.down.bits),
                codebook=one.gate.codebook,
                host_range=(host.address, host.address + host.span_bytes),
            ),
            scales=self.scales,
            experts=rows,
            expert_map=layer.expert_map,
            block_bytes=arena.block_bytes(self.index),
            fill=None if self.state.cache is None else self.state.counters.fill_of(self.index),
            counters=None if device.type == "cpu" else self.state.counters.on_device(self.index),
            swiglu_limit=layer.swiglu_limit,
            weight_on_input=layer.apply_router_weight_on_input,
        )

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch.ops.vllm.appliance_experts(x, topk_weights, topk_ids, self.prefix)


def _experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, name: str
) -> torch.Tensor:
    current = state()
    live = current.by_name[name]
    rows = topk_ids if live.expert_map is None else live.expert_map[topk_ids.long()]
    if live.counters is None:
        first, last = live.table.host_range
        read_at = live.table.addresses[:, 0, 0]
        host_bytes = live.block_bytes * ((read_at >= first) & (read_at < last)).long()
        current.counters.record(live.shape.index, rows[rows >= 0], host_bytes)
    return ops.experts(
        x,
        topk_weights.float(),
        rows,
        live.table,
        swiglu_limit=live.swiglu_limit,
        weight_on_input=live.weight_on_input,
        counters=live.counters,
        fill=live.fill,
    )


def _experts_fake(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, name: str
) -> torch.Tensor:
    return torch.empty_like(x)


compat.register_op("appliance_experts", _experts, _experts_fake)
