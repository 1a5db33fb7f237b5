"""HTTP routes beside vLLM's own (entry-point group vllm.endpoint_plugins). The gateway in front
lets only the launcher's control key reach them."""

from __future__ import annotations

from typing import Any


class Endpoints:
    """POST /appliance/prove and reset; GET /appliance/state, picks and learned."""

    name = "appliance"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        app.add_api_route("/appliance/prove", self._prove, methods=["POST"])
        app.add_api_route("/appliance/reset", self._reset, methods=["POST"])
        app.add_api_route("/appliance/state", self._state, methods=["GET"])
        app.add_api_route("/appliance/picks", self._picks, methods=["GET"])
        app.add_api_route("/appliance/learned", self._learned, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        self._engine = engine_client

    async def _prove(self) -> dict[str, Any]:
        return {"ranks": await self._engine.collective_rpc("appliance_prove")}

    async def _reset(self) -> dict[str, Any]:
        await self._engine.collective_rpc("appliance_reset")
        return {}

    async def _state(self) -> dict[str, Any]:
        return {"ranks": await self._engine.collective_rpc("appliance_state")}

    async def _picks(self) -> dict[str, Any]:
        return {"ranks": await self._engine.collective_rpc("appliance_picks")}

    async def _learned(self) -> dict[str, Any]:
        return {"ranks": await self._engine.collective_rpc("appliance_learned")}
