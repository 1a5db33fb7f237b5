"""A worker whose experts are made in memory and whose routers draw from recorded counts.

Every expert gets the bytes of one drawn expert: what is measured is where they are read, and no
disk holds 163 GB. A router gives log p of the traffic plus Gumbel noise, so that top-k draws
distinct experts with the probabilities of p, one after another, inside a CUDA graph.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from appliance.checkpoint.safetensors import read_bytes
from appliance.engine import compat
from appliance.engine.cache import open_cache
from appliance.engine.config import checkpoint_of
from appliance.engine.rank import state
from appliance.engine.worker import Worker

DTYPES = {"I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32}
SHARDS = {0: "w1", 1: "w3", 2: "w2"}
NEVER = -40.0  # log probability of an expert that the counts have not seen


@register_model_loader("made_in_memory")
class MadeInMemory(BaseModelLoader):
    """Everything but experts from the shards; experts from the first one's drawn bytes."""

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        checkpoint = checkpoint_of(str(model_config.model))
        prefixes = tuple(layer.prefix + "." for layer in checkpoint.layers)
        rest = [name for name in checkpoint.tensors if not name.startswith(prefixes)]
        model.load_weights((name, _stored(checkpoint, name)) for name in rest)
        first = checkpoint.target_layers[0]
        drawn = {
            (p, kind): _stored(checkpoint, f"{first.prefix}.0.{word}.{kind}").to(_device())
            for p, word in enumerate(first.projection_names)
            for kind in ("trellis", "suh", "svh")
        }
        for module in model.modules():
            if isinstance(module, compat.RoutedExperts):
                method: Any = module.quant_method
                for expert in method.local:
                    for (p, kind), tensor in drawn.items():
                        method._load(kind, None, tensor, "", SHARDS[p], expert)


def _device() -> torch.device:
    return torch.empty(0).device


def _stored(checkpoint: Any, name: str) -> torch.Tensor:
    tensor = checkpoint.tensors[name]
    raw = bytearray(read_bytes(checkpoint.path, tensor))
    return torch.frombuffer(raw, dtype=DTYPES[tensor.dtype]).reshape(tensor.shape)


class DrawnRouter:
    """In place of a router's forward: what the traffic of its layer would choose."""

    def __init__(self, gate: Any, experts: int) -> None:
        self.log_p = torch.zeros(experts, device=state().book.numbers.device)
        self.returns_bias = getattr(gate, "return_bias", True)

    def __call__(self, x: torch.Tensor) -> Any:
        noise = torch.empty(len(x), len(self.log_p), device=x.device).exponential_()
        logits = self.log_p - noise.log()
        return (logits, None) if self.returns_bias else logits


class MadeInMemoryWorker(Worker):
    """Importing this module is what registers the loader; the routers stay the model's own."""


class CacheWorker(Worker):
    """A worker whose slots' rules can be changed while it runs, and that notes its steps' rows."""

    rows: list[int]

    def execute_model(self, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            self.rows.append(scheduler_output.total_num_scheduled_tokens)
        return super().execute_model(scheduler_output)

    def load_model(self, *args: Any, **options: Any) -> None:
        super().load_model(*args, **options)
        self.rows = []
        cache = state().cache
        self.planned_rules = None if cache is None else cache.policy.rules

    def cache_rules(self, update: dict[str, Any]) -> None:
        """The plan's rules of the slots, changed so, from the next step on."""
        state().cache.policy.rules = self.planned_rules.model_copy(update=update)

    def cache_rows(self) -> list[int]:
        """Rows of each step since it was last asked."""
        found, self.rows = self.rows, []
        return found

    def cache_swap_two(self) -> tuple[int, int, int] | None:
        """A fault: the last rank reads two experts of its second layer each in the other's place.
        Says (layer, expert, expert); asked again, it is mended."""
        book, last = state().book, self.parallel_config.world_size - 1
        if self.rank != last:
            return None
        layer = list(book.rows)[1]
        one, two = book.rows[layer][:2]
        numbers = book.numbers.cpu()
        places = list(book.trellises(layer, one)), list(book.trellises(layer, two))
        numbers[places[0]], numbers[places[1]] = numbers[places[1]], numbers[places[0]]
        book.numbers.copy_(numbers)
        return layer, one, two

    def cache_held(self) -> list[tuple[int, int]]:
        """(layer, expert) of every filled slot."""
        return sorted(state().arena.held)


class TrafficWorker(CacheWorker):
    """Routers that draw from counts; and, as all blocks hold the same bytes, any placement at once:
    only addresses change."""

    def load_model(self, *args: Any, **options: Any) -> None:
        super().load_model(*args, **options)
        gates = (m for m in self.model_runner.model.modules() if isinstance(m, GateLinear))
        self.traffic_routers = {}
        for layer, gate in zip(sorted(state().live), gates, strict=True):
            experts = len(state().live[layer].shape.experts)
            self.traffic_routers[layer] = gate.forward = DrawnRouter(gate, experts)
        self.planned_held = dict(state().arena.held)

    def traffic_route(self, topic: str) -> None:
        """From now on rows are of this topic of the counts file."""
        counts = json.loads(Path(compat.settings_of(self.vllm_config)["traffic"]).read_text())
        for layer, router in self.traffic_routers.items():
            p = torch.tensor(counts[topic][str(layer)], dtype=torch.float64)
            log_p = (p / p.sum()).log().clamp(min=NEVER)
            router.log_p.copy_(log_p.float())

    def traffic_as_planned(self, rules: dict[str, float]) -> None:
        """Slots as the plan fills them, nothing learned, the plan's rules changed so."""
        now = state()
        now.arena.held = dict(self.planned_held)
        self._read_at({key: now.arena.address(*key) for key in now.book.experts})
        self._count_from_zero(rules)

    def traffic_whole_layers(self) -> None:
        """As many experts on the host as now are read there at most, but the last layers' ones."""
        now = state()
        device = [b.address for b in now.arena.blocks.values() if b.home == "device"]
        device += [slot for slots in now.arena.slots.values() for slot in slots]
        host = [b.address for b in now.arena.blocks.values() if b.home == "host"]
        away = len(now.book.experts) - len(device)
        addresses = device + host[:away]
        self._read_at(dict(zip(sorted(now.book.experts), addresses, strict=True)))
        self._count_from_zero({"promotions_per_row": 0.0})

    def _read_at(self, blocks: dict[tuple[int, int], int]) -> None:
        """(layer, expert) -> address of the block that the kernels are to read."""
        now = state()
        numbers = now.book.numbers.cpu()
        for key, block in blocks.items():
            places = list(now.book.trellises(*key))
            numbers[places] = torch.tensor(
                now.arena.trellis_addresses(*key, block), device=numbers.device
            )
        now.book.numbers.copy_(numbers)

    def _count_from_zero(self, rules: dict[str, float]) -> None:
        now = state()
        now.counters.reset()
        now.counters.fill.zero_()
        if now.cache is not None:
            changed = self.planned_rules.model_copy(update=rules)
            now.cache = open_cache(now.arena, now.book, now.counters, changed, {})
            now.cache.start()
