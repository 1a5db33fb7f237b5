"""A gateway over a small Starlette app, with its two key files."""

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute

from appliance.gateway import Gateway
from appliance.settings import Settings

USER = {"Authorization": "Bearer sk-user"}
CONTROL = {"Authorization": "Bearer control"}


async def echo(request):
    return JSONResponse({"length": len(await request.body())})


async def health(request):
    return PlainTextResponse("fine")


async def ticks(request):
    async def stream():
        for number in range(int(request.query_params["n"])):
            yield f"{number}\n"
            await asyncio.sleep(0.05)

    return StreamingResponse(stream())


async def words(socket):
    await socket.accept()
    await socket.send_text("hello")
    await socket.receive_text()
    await socket.close()


APP = Starlette(
    routes=[
        Route("/health", health, methods=["GET", "POST"]),
        Route("/ticks", ticks),
        Route("/appliance/prove", echo, methods=["POST"]),
        WebSocketRoute("/words", words),
        Route("/{anything:path}", echo, methods=["GET", "POST", "PUT", "DELETE", "OPTIONS"]),
    ]
)


@dataclass
class Door:
    """The gateway, its key file, and a client that never leaves the process."""

    gateway: Gateway
    keys: Path
    client: httpx.AsyncClient

    async def admit(self):
        assert (await self.client.post("/gateway/admit", headers=CONTROL)).status_code == 200

    async def in_flight(self) -> int:
        return (await self.client.get("/gateway/state", headers=CONTROL)).json()["in_flight"]


@pytest.fixture
def settings(tmp_path) -> Settings:
    keys, control = tmp_path / "keys", tmp_path / "control"
    keys.write_text("# people\nsk-user\nsk-other\n")
    control.write_text("control\n")
    return Settings(
        state_dir=tmp_path,
        gateway_keys=keys,
        gateway_control_key=control,
        gateway_max_body_bytes=1000,
        gateway_max_header_bytes=2000,
    )


@pytest.fixture
def door(settings) -> Door:
    gateway = Gateway(APP, settings)
    transport = httpx.ASGITransport(gateway)
    client = httpx.AsyncClient(transport=transport, base_url="http://here")
    return Door(gateway, settings.gateway_keys, client)


@pytest.fixture
def serve():
    """serve(settings) -> base address of the same app on a real uvicorn, on loopback."""
    with contextlib.ExitStack() as stack:

        def start(settings: Settings) -> str:
            config = uvicorn.Config(Gateway(APP, settings), port=0, log_level="error")
            server = uvicorn.Server(config)
            listening = config.bind_socket()
            thread = threading.Thread(target=server.run, args=([listening],))
            thread.start()

            def finish():
                server.should_exit = server.force_exit = True
                thread.join(10)
                listening.close()

            stack.callback(finish)
            while not server.started:
                time.sleep(0.01)
            return f"http://127.0.0.1:{listening.getsockname()[1]}"

        yield start
