"""The client against a server whose every token has a known time."""

import asyncio
import socket
import statistics
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bench.client import Answer, Endpoint, ask
from appliance.bench.events import Decoder

Serve = Callable[[float, float], str]
HI = [{"role": "user", "content": "one two three"}]


def one(url: str, model: str = "fine", tokens: int = 20, timeout: float = 20.0) -> Answer:
    return asyncio.run(ask(Endpoint(url, model, "key", timeout), HI, tokens))


def added_by_the_client(url: str) -> tuple[float, float]:
    """Median error of the gaps in seconds, and CPU seconds a piece, over 64 streams x 200 tokens.

    The text of each token is the time it was sent: the client's gap minus the server's gap.
    """
    endpoint = Endpoint(url, "fine")

    async def all_of_them() -> list[Answer]:
        return await asyncio.gather(*(ask(endpoint, HI, 200) for _ in range(64)))

    before = time.process_time()
    answers = asyncio.run(all_of_them())
    cpu_seconds = time.process_time() - before
    assert [a.error for a in answers] == [None] * 64
    added = []
    for answer in answers:
        sent = [float(word) for word in answer.text.split()]
        got = answer.token_times
        assert len(sent) == len(got) == 200
        added += [
            abs((got[i + 1] - got[i]) - (sent[i + 1] - sent[i])) for i in range(len(sent) - 1)
        ]
    return statistics.median(added), cpu_seconds / (64 * 200)


def test_64_streams_at_200_tokens_a_second_add_under_half_a_millisecond(timed: Serve) -> None:
    """The best of a few rounds: neighbours on the same cores only ever add.

    CPU time is the client's own: 12,800 pieces a second must leave some of a core free.
    """
    url = timed(5.0, 50.0)
    rounds = []
    while len(rounds) < 6 and not (rounds and min(rounds)[0] < 0.5e-3):
        rounds.append(added_by_the_client(url))
    assert min(rounds)[0] < 0.5e-3, rounds
    assert min(cpu for _, cpu in rounds) < 60e-6, rounds


@pytest.mark.parametrize(
    ("mood", "words"),
    [
        ("http-429", "too many requests"),
        ("reset", ""),
        ("cut-off", "after 3 pieces"),
        ("error-event", "engine died"),
    ],
)
def test_what_goes_wrong_has_a_name(timed: Serve, mood: str, words: str) -> None:
    answer = one(timed(1.0, 1.0), mood)
    # An abort on the loopback may arrive as an orderly end.
    names = {"reset": {"reset", "cut-off"}}.get(mood, {mood})
    assert answer.error in names
    assert words in (answer.detail or "")


def test_broken_json_is_a_bad_answer(timed: Serve) -> None:
    assert one(timed(1.0, 1.0), "bad-json").error == "bad-answer"


def test_a_server_that_hangs_times_out_and_keeps_what_came(timed: Serve) -> None:
    answer = one(timed(1.0, 1.0), "hang", timeout=1.0)
    assert answer.error == "timeout" and len(answer.token_times) == 3
    assert answer.latency >= 1.0


def test_nobody_listening_is_a_connect_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert one(f"http://127.0.0.1:{port}/v1").error == "connect"


def test_missing_usage_is_unknown_not_zero(timed: Serve) -> None:
    answer = one(timed(1.0, 1.0), "no-usage")
    assert answer.error is None and answer.usage is None


def test_empty_chunks_are_counted(timed: Serve) -> None:
    answer = one(timed(1.0, 1.0), "empty", tokens=7)
    assert (answer.empty_chunks, len(answer.token_times)) == (7, 7)


def test_times_are_the_servers(timed: Serve) -> None:
    answer = one(timed(20.0, 100.0), tokens=20)
    assert answer.usage == {"prompt_tokens": 3, "completion_tokens": 20}
    assert 0.1 <= answer.token_times[0] < 0.3
    assert 0.36 <= answer.token_times[-1] - answer.token_times[0] < 0.5


EVENTS = [b'{"a": 1}', b'{"b": "x: y"}', b'{"c": []}']


@given(st.data(), st.booleans(), st.sampled_from([b"\n", b"\r\n"]))
def test_any_cut_of_the_bytes_gives_the_same_events(
    data: st.DataObject, chunked: bool, end: bytes
) -> None:
    body = b"".join(b"data: " + e + end + end for e in EVENTS) + b": note" + end
    body += b"data: [DONE]" + end + end
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    if chunked:
        size = data.draw(st.integers(1, 40))
        parts = [body[i : i + size] for i in range(0, len(body), size)]
        wire = head + b"Transfer-Encoding: chunked\r\n\r\n"
        wire += b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"
    else:
        wire = head + b"\r\n" + body
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    decoder, found = Decoder(), []
    for low, high in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        found += decoder.feed(wire[low:high])
    assert found == EVENTS
    assert decoder.finished and decoder.status == 200
