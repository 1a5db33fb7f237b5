"""When it answers: not before the proof, not while draining; and how much it takes."""

import asyncio

import httpx
import pytest

from .conftest import CONTROL, USER


def test_before_admission_users_wait_and_control_does_not(door):
    async def ask(headers):
        return await door.client.post("/v1/completions", headers=headers, content=b"x")

    answer = asyncio.run(ask(USER))
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"] == {
        "message": "the engine has not proved itself yet",
        "type": "service_unavailable",
        "param": None,
        "code": "not_ready",
    }
    assert asyncio.run(ask(CONTROL)).json() == {"length": 1}


def test_draining_refuses_new_requests_and_admitting_again_takes_them(door):
    async def ask():
        await door.admit()
        await door.client.post("/gateway/drain", headers=CONTROL)
        refused = await door.client.get("/v1/models", headers=USER)
        await door.admit()
        taken = await door.client.get("/v1/models", headers=USER)
        return refused, taken

    refused, taken = asyncio.run(ask())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert "retry-after" in refused.headers
    assert taken.status_code == 200


def test_a_request_is_in_flight_until_its_stream_ends(door):
    async def ask():
        await door.admit()
        stream = asyncio.create_task(door.client.get("/ticks?n=6", headers=USER))
        await asyncio.sleep(0.1)
        during = await door.in_flight()
        await door.client.post("/gateway/drain", headers=CONTROL)
        answer = await stream
        return during, answer.text, await door.in_flight()

    assert asyncio.run(ask()) == (1, "0\n1\n2\n3\n4\n5\n", 0)


def test_a_failing_app_leaves_nothing_in_flight(door):
    async def fail(scope, receive, send):
        raise RuntimeError("boom")

    async def ask():
        await door.admit()
        door.gateway._app = fail
        with pytest.raises(RuntimeError):
            await door.client.get("/v1/models", headers=USER)
        return await door.in_flight()

    assert asyncio.run(ask()) == 0


@pytest.mark.parametrize(("length", "status"), [(1000, 200), (1001, 413), (100_000, 413)])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_declared_or_not(door, length, status, chunked):
    async def pieces():
        for start in range(0, length, 400):
            yield b"x" * min(400, length - start)

    async def ask():
        await door.admit()
        content = pieces() if chunked else b"x" * length
        return await door.client.post("/v1/completions", headers=USER, content=content)

    answer = asyncio.run(ask())
    assert answer.status_code == status
    if status == 413:
        assert answer.json()["error"]["message"] == "the request body is longer than 1000 bytes"
    else:
        assert answer.json() == {"length": 1000}


def test_headers_over_the_limit_are_refused_before_the_key_is_looked_at(door):
    async def ask():
        return await door.client.get("/v1/models", headers={"x-long": "x" * 3000})

    assert asyncio.run(ask()).status_code == 431


def test_unknown_gateway_routes_are_not_found_and_never_reach_the_app(door):
    async def ask(method, path):
        return (await door.client.request(method, path, headers=CONTROL)).status_code

    assert asyncio.run(ask("GET", "/gateway/admit")) == 404
    assert asyncio.run(ask("POST", "/gateway/state")) == 404


def test_a_client_that_leaves_is_no_longer_in_flight(settings, serve):
    base = serve(settings)

    async def ask():
        async with httpx.AsyncClient(base_url=base) as client:
            await client.post("/gateway/admit", headers=CONTROL)
            async with client.stream("GET", "/ticks?n=1000", headers=USER) as answer:
                await anext(answer.aiter_text())
                state = await client.get("/gateway/state", headers=CONTROL)
                during = state.json()["in_flight"]
            for _ in range(100):
                await asyncio.sleep(0.05)
                state = await client.get("/gateway/state", headers=CONTROL)
                if state.json()["in_flight"] == 0:
                    return during, 0
            return during, state.json()["in_flight"]

    assert asyncio.run(ask()) == (1, 0)


def test_over_a_real_socket_a_websocket_needs_a_key_too(settings, serve):
    base = serve(settings)
    handshake = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg==",
    }
    assert httpx.get(f"{base}/words", headers=handshake).status_code == 403
