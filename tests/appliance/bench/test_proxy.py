"""A session through the recording proxy: nothing is changed, and no text is kept."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from appliance.bench.client import Answer, Endpoint, Message, ask
from appliance.bench.proxy import Proxy
from appliance.bench.recorder import Recorder
from appliance.bench.traces import read_trace

Serve = Callable[[float, float], str]
SYSTEM = {"role": "system", "content": "zebra " * 60}


def through(upstream: str, recorder: Recorder, use: Callable[[str], Awaitable[None]]) -> None:
    async def both() -> None:
        ports: asyncio.Queue[int] = asyncio.Queue()
        proxy = Proxy(upstream.removesuffix("/v1"), recorder)
        serving = asyncio.create_task(proxy.serve(0, ports.put_nowait))
        try:
            await use(f"http://127.0.0.1:{await ports.get()}/v1")
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(both())


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def lines(file: Path) -> list[dict[str, dict[str, object]]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def talk(url: str, model: str = "fine") -> list[Answer]:
    """Two conversations with one system prompt; the first has two turns."""
    to, said = Endpoint(url, model, "secret-key", 20.0), []
    history = [SYSTEM, user("giraffe one two")]
    said.append(await ask(to, history, 20))
    history += [{"role": "assistant", "content": said[0].text}, user("okapi")]
    said.append(await ask(to, history, 8))
    said.append(await ask(to, [SYSTEM, user("lemur")], 6))
    return said


def test_a_real_session_becomes_a_trace_without_its_text(tmp_path: Path, timed: Serve) -> None:
    file, answers = tmp_path / "r.jsonl", []

    async def use(url: str) -> None:
        answers.extend(await talk(url))

    through(timed(5.0, 20.0), Recorder(file), use)
    assert [a.error for a in answers] == [None] * 3
    assert [len(a.token_times) for a in answers] == [20, 8, 6]
    raw = file.read_text()
    for word in ("zebra", "giraffe", "okapi", "lemur", "secret-key", answers[0].text.split()[0]):
        assert word not in raw
    rows = lines(file)
    names = [row["metadata"]["conversation_id"] for row in rows]
    assert names[0] == names[1] != names[2]
    assert [row["metadata"]["turn_index"] for row in rows] == [0, 1, 0]
    first = rows[0]["metrics"]["time_to_first_token"]
    assert 20 <= first["value"] < 200  # type: ignore[index]
    one, two = sorted(read_trace(file), key=lambda s: -len(s.turns))
    assert [t.output_tokens for t in one.turns] == [20, 8]
    shared = {p.key for p in one.turns[0].pieces} & {p.key for p in two.turns[0].pieces}
    assert len(shared) == 1  # the system prompt is the same text in both
    assert sum(p.tokens for p in one.turns[0].pieces) == 63
    assert [p.tokens for p in one.turns[1].pieces] == [1]


def test_text_is_kept_where_it_is_asked_for(tmp_path: Path, timed: Serve) -> None:
    file = tmp_path / "r.jsonl"

    async def use(url: str) -> None:
        await talk(url)

    through(timed(1.0, 1.0), Recorder(file, with_text=True), use)
    assert file.stat().st_mode & 0o077 == 0  # what people said is theirs
    assert "giraffe" in file.read_text() and "secret-key" not in file.read_text()


@pytest.mark.parametrize("mood", ["http-429", "cut-off", "error-event", "no-usage"])
def test_what_goes_wrong_is_kept_by_name(tmp_path: Path, timed: Serve, mood: str) -> None:
    file, recorder = tmp_path / "r.jsonl", Recorder(tmp_path / "r.jsonl")

    async def use(url: str) -> None:
        answer = await ask(Endpoint(url, mood, None, 20.0), [user("giraffe")], 9)
        assert answer.error == (None if mood == "no-usage" else mood)

    through(timed(1.0, 1.0), recorder, use)
    (row,) = lines(file)
    assert recorder.without_usage == (mood != "error-event")
    assert row["error"] == (None if mood == "no-usage" else {"type": mood, "message": None})


def test_a_client_that_leaves_is_named(tmp_path: Path, timed: Serve) -> None:
    file = tmp_path / "r.jsonl"

    async def use(url: str) -> None:
        gone = await ask(Endpoint(url, "fine", None, 0.3), [user("giraffe")], 400)
        assert gone.error == "timeout"
        for _ in range(200):
            await asyncio.sleep(0.05)
            if file.exists():
                return

    through(timed(10.0, 1.0), Recorder(file), use)
    (row,) = lines(file)
    assert row["error"]["type"] == "client-left" and row["metadata"]["was_cancelled"] is True


def test_other_pages_pass_and_an_absent_server_is_a_502(tmp_path: Path, timed: Serve) -> None:
    file, said = tmp_path / "r.jsonl", []

    def get(url: str) -> None:
        with urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
            said.append(json.load(answer))

    async def use(url: str) -> None:
        await asyncio.to_thread(get, url)

    through(timed(1.0, 1.0), Recorder(file), use)
    assert said[0]["data"][0]["id"] == "fine" and not file.exists()
    with pytest.raises(urllib.error.HTTPError) as refused:
        through("http://127.0.0.1:1/v1", Recorder(file), use)
    refused.value.close()
    assert refused.value.code == 502
