"""vLLM's worker with our steps around its steps, and what the launcher may ask of it.

Chosen with --worker-cls; questions come by collective_rpc, in order with the steps on every rank.
"""

from __future__ import annotations

from typing import Any

from appliance.engine import compat, deepseek_v41
from appliance.engine.config import METHOD, Exl3Config, checkpoint_of
from appliance.engine.places import PLACES, place_of
from appliance.engine.proof import homes, prove
from appliance.engine.rank import RankState, slot_cache, state


class Worker(compat.platform_worker()):  # type: ignore[misc]  # vLLM's class of this platform
    """Names that are ours are prefixed: they share the namespace of vLLM's Worker."""

    vllm_config: Any

    def load_model(self, *args: Any, **options: Any) -> None:
        settings = compat.settings_of(self.vllm_config)
        if "checkpoint" in settings:
            deepseek_v41.prepare(checkpoint_of(settings["checkpoint"]))
        super().load_model(*args, **options)

    def execute_model(self, scheduler_output: Any) -> Any:
        """One step. Slots change before it, in stream order; its counts are taken after it."""
        rows = scheduler_output.total_num_scheduled_tokens
        cache = slot_cache() if rows else None
        if cache is None:
            return super().execute_model(scheduler_output)
        cache.before_step()
        output = super().execute_model(scheduler_output)
        cache.after_step(rows)
        return output

    def appliance_prove(self) -> dict[str, Any]:
        """This rank's proof (see proof.prove), if it is us who serve the method at all."""
        compat.require_owner(METHOD, Exl3Config)
        settings = compat.settings_of(self.vllm_config)
        return prove(state(), checkpoint_of(settings["checkpoint"]))

    def appliance_state(self) -> dict[str, Any]:
        """This rank's homes and slots, its picks by where they were read, bytes from the host."""
        current = state()
        host = current.arena.pools["host"].mapping
        layers = _picks_by_layer(current)
        host_bytes = current.counters.host_bytes
        return {
            "rank": current.arena.plan.rank,
            "method_owner": compat.owner_of(METHOD),
            "homes": homes(current.arena),
            "picks": {place: sum(row[place] for row in layers.values()) for place in PLACES},
            "host_bytes_read": sum(host_bytes.values()),
            "layers": {
                str(layer): {**row, "host_bytes_read": host_bytes[layer]}
                for layer, row in layers.items()
            },
            "promotions": 0 if current.cache is None else current.cache.tally.promotions,
            "cache": None if current.cache is None else current.cache.mode,
            "picks_not_here": current.counters.picks_not_here,
            "host_pages": None if host is None else host.page_kind,
        }

    def appliance_picks(self) -> dict[str, list[int]]:
        """Picks per expert of each layer since the last reset: what Heat is made of."""
        current = state()
        return {
            str(layer): [picks.get(e, 0) for e in range(len(current.arena.layers[layer].experts))]
            for layer, picks in sorted(current.counters.picks.items())
        }

    def appliance_learned(self) -> dict[str, list[float]] | None:
        """Recent picks per expert of each layer, as the cache weighs them; None without slots."""
        cache = state().cache
        if cache is None:
            return None
        cache.settle()
        return {str(layer): counts for layer, counts in sorted(cache.policy.recent().items())}

    def appliance_reset(self) -> None:
        """Counters to zero: warm-up and proof rows are not traffic. The slots follow from here."""
        current = state()
        current.counters.reset()
        if current.cache is not None:
            current.cache.start()


def _picks_by_layer(current: RankState) -> dict[int, dict[str, int]]:
    """layer -> {"device", "slot", "host"}: picks by where the expert was read."""
    cache = current.cache
    if cache is not None and cache.started:
        cache.settle()
        tally = cache.tally
        return {
            layer: {
                "device": tally.picks[i] - tally.slots[i] - tally.cold[i],
                "slot": tally.slots[i],
                "host": tally.cold[i],
            }
            for i, layer in enumerate(current.book.rows)
        }
    out = {layer: {str(place): 0 for place in PLACES} for layer in current.book.rows}
    for layer, picks in current.counters.picks.items():
        for expert, count in picks.items():
            out[layer][place_of(current.arena, layer, expert)] += count
    return out
