"""What the launcher may ask of every worker (vLLM: --worker-extension-cls, collective_rpc)."""

from __future__ import annotations

from typing import Any

from appliance.engine import compat
from appliance.engine.config import METHOD, Exl3Config, checkpoint_of
from appliance.engine.experts import state
from appliance.engine.proof import homes, prove


class WorkerExtension:
    """Mixed into vLLM's Worker. Names are prefixed: they share its namespace."""

    vllm_config: Any

    def appliance_prove(self) -> dict[str, Any]:
        """This rank's proof (see proof.prove), if it is us who serve the method at all."""
        compat.require_owner(METHOD, Exl3Config)
        settings = compat.settings_of(self.vllm_config)
        return prove(state(), checkpoint_of(settings["checkpoint"]))

    def appliance_state(self) -> dict[str, Any]:
        """This rank's homes, its picks in each, and the bytes read from the host so far."""
        current = state()
        blocks = current.arena.blocks
        picks = {"device": 0, "host": 0}
        for layer, counts in current.counters.picks.items():
            for expert, count in enumerate(counts.tolist()):
                if count:
                    picks[blocks[layer, expert].home] += count
        host = current.arena.pools["host"].mapping
        return {
            "rank": current.arena.plan.rank,
            "method_owner": compat.owner_of(METHOD),
            "homes": homes(current.arena),
            "picks": picks,
            "host_bytes_read": current.counters.host_bytes_read,
            "picks_not_here": current.counters.picks_not_here,
            "host_pages": None if host is None else host.page_kind,
        }

    def appliance_picks(self) -> dict[str, list[int]]:
        """Picks per expert of each layer since the last reset: what Heat is made of."""
        return {str(layer): c.tolist() for layer, c in sorted(state().counters.picks.items())}

    def appliance_reset(self) -> None:
        """Counters to zero: warm-up and proof rows are not traffic."""
        state().counters.reset()
