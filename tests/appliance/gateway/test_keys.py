"""Who gets in: deny by default, in front of every route."""

import asyncio
import json

import pytest

from appliance.errors import UsageError
from appliance.gateway import Gateway
from appliance.settings import read_settings

from .conftest import APP, CONTROL, USER

ROUTES = ["/v1/completions", "/invocations", "/metrics", "/tokenize", "/docs", "/openapi.json",
          "/ping", "/", "/nothing", "/v1/models", "/healthz", "/health/", "//health",
          "/health/../v1/models", "/HEALTH", "/gateway/state", "/appliance/prove"]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE", "HEAD"])
@pytest.mark.parametrize("path", ROUTES)
def test_no_route_answers_without_a_key(door, method, path):
    async def ask():
        await door.admit()
        return await door.client.request(method, path)

    answer = asyncio.run(ask())
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key" if method != "HEAD" else True


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer sk-use"},
        {"Authorization": "Bearer sk-user2"},
        {"Authorization": "Basic sk-user"},
        {"Authorization": "sk-user"},
        {"Authorization": "Bearer # people"},
        {"x-api-key": ""},
        {"x-api-key": "sk-USER"},
        {"Cookie": "sk-user"},
    ],
)
def test_only_a_whole_key_in_its_place_opens(door, headers):
    async def ask():
        await door.admit()
        return await door.client.get("/v1/models", headers=headers)

    assert asyncio.run(ask()).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [USER, {"authorization": "bearer sk-user"}, {"X-API-Key": "sk-other"}, CONTROL],
)
def test_every_key_of_the_file_opens_both_ways_of_sending_it(door, headers):
    async def ask():
        await door.admit()
        return await door.client.get("/v1/models", headers=headers)

    assert asyncio.run(ask()).status_code == 200


def test_health_is_open_to_get_and_head_only(door):
    async def ask(method):
        return (await door.client.request(method, "/health")).status_code

    assert [asyncio.run(ask(m)) for m in ("GET", "HEAD", "POST")] == [200, 200, 401]


def test_a_changed_key_file_counts_from_the_next_request(door):
    async def ask(key):
        answer = await door.client.get("/v1/models", headers={"x-api-key": key})
        return answer.status_code

    asyncio.run(door.admit())
    aside = door.keys.with_name("new")
    aside.write_text("sk-new\n")
    aside.replace(door.keys)
    assert [asyncio.run(ask(key)) for key in ("sk-user", "sk-new")] == [401, 200]
    door.keys.unlink()
    assert asyncio.run(ask("sk-new")) == 401, "no file: nobody enters"
    door.keys.write_text("\n# nobody\n")
    assert asyncio.run(ask("")) == 401


def test_control_routes_refuse_a_users_key(door):
    async def ask(path, method="POST"):
        await door.admit()
        return await door.client.request(method, path, headers=USER)

    paths = ("/appliance/prove", "/gateway/drain", "/gateway/admit", "/gateway/nothing",
             "/scale_elastic_ep", "/is_scaling_elastic_ep")  # fmt: skip
    for path in paths:
        answer = asyncio.run(ask(path))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "control_key_required")
    assert asyncio.run(door.in_flight()) == 0


def test_a_websocket_without_a_key_is_closed(door):
    async def connect(headers):
        sent = []
        messages = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "x"}]

        async def receive():
            return messages.pop(0)

        async def send(message):
            sent.append((message["type"], message.get("code")))

        scope = {"type": "websocket", "path": "/words", "headers": headers, "query_string": b"",
                 "subprotocols": []}  # fmt: skip
        await door.gateway(scope, receive, send)
        return sent

    key = [(b"authorization", b"Bearer sk-user")]
    assert asyncio.run(connect([])) == [("websocket.close", 1008)]
    assert asyncio.run(connect(key)) == [("websocket.close", 1013)]
    asyncio.run(door.admit())
    kinds = [kind for kind, _ in asyncio.run(connect(key))]
    assert kinds == ["websocket.accept", "websocket.send", "websocket.close"]


def test_a_gateway_without_key_files_does_not_start():
    with pytest.raises(UsageError, match="no key files"):
        Gateway(APP, read_settings({}))


def test_an_answer_never_repeats_the_key(door):
    async def ask():
        return await door.client.get("/v1/models", headers={"x-api-key": "sk-almost"})

    answer = asyncio.run(ask())
    assert "sk-almost" not in json.dumps([answer.text, dict(answer.headers)])
