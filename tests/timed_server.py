"""An OpenAI-compatible server that sends token i at a known time, in its own process.

    python timed_server.py PORT_FILE INTERVAL_MS FIRST_MS

It paces each stream on an absolute schedule and writes the true times (the same monotonic clock as
the client's) into each event, so a client's own delay is the difference. What the request's `model`
says makes it misbehave: http-429, reset, cut-off, hang, no-usage, empty, bad-json, error-event.

`small` refuses what does not fit in its context, as vLLM does.

`cache` and `no-cache` read a prompt at READ_SECONDS a word (less what the cache holds) before the
first token, and while they read, tokens of other streams come SLOWER times as far apart.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

STARTED = time.time()
INTERVAL, FIRST = float(sys.argv[2]) / 1e3, float(sys.argv[3]) / 1e3
READ_SECONDS, SLOWER = 1e-4, 3
MODELS = {"data": [{"id": "fine", "max_model_len": 4096}]}
seen: list[list[str]] = []  # prompts read, as words
counted = {"queries": 0, "hits": 0}
reading = 0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
HEAD += b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(payload: str) -> bytes:
    data = f"data: {payload}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(delta: dict[str, str], finish: str | None = None) -> bytes:
    return chunk(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await one(reader, writer):
            pass
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the client has gone
    finally:
        writer.close()


async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether the connection stays open for another request."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b"/chat/completions " not in head.partition(b"\r\n")[0]:
        writer.write(page(head.split()[1]))
        return False
    size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    asked = json.loads(await reader.readexactly(size))
    whole = await answer(asked, asked["model"], writer)
    await writer.drain()
    return whole and b"connection: close" not in head.lower()


def page(path: bytes) -> bytes:
    if path == b"/v1/models":
        body = json.dumps(MODELS).encode()
    elif path == b"/metrics":
        names = [f"vllm:prefix_cache_{k}_total {v}.0" for k, v in counted.items()]
        body = "\n".join([*names, f"process_start_time_seconds {STARTED}", ""]).encode()
    else:
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def read(words: list[str], keep: bool) -> int:
    """Takes its time, and says how many words were known."""
    global reading
    known = max((common(words[:-1], old) for old in seen if keep), default=0)
    counted["queries"] += len(words)
    counted["hits"] += known
    if keep:
        seen.append(words)
    reading += 1
    await asyncio.sleep(READ_SECONDS * (len(words) - known))
    reading -= 1
    return known


def common(a: list[str], b: list[str]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


async def answer(asked: dict, mood: str, writer: asyncio.StreamWriter) -> bool:
    if mood == "http-429":
        body = b'{"error": {"message": "too many requests"}}'
        writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return False
    words = [w for m in asked["messages"] for w in str(m["content"]).split()]
    if mood == "small" and len(words) + asked["max_tokens"] > MODELS["data"][0]["max_model_len"]:
        body = b'{"error": {"message": "the maximum context length is 4096 tokens"}}'
        writer.write(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return False
    writer.write(HEAD)
    known = await read(words, mood == "cache") if mood in ("cache", "no-cache") else None
    count = asked.get("max_tokens") or asked["max_completion_tokens"]
    due = time.perf_counter() + FIRST
    for index in range(count):
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if writer.transport.is_closing():
            return False
        if index == 0:  # with the first token, as vLLM does
            writer.write(event({"role": "assistant", "content": ""}))
        if index == 3 and mood == "reset":
            writer.transport.abort()
        if index == 3 and mood == "hang":
            await asyncio.sleep(3600)
        if index == 3 and mood in ("reset", "cut-off"):
            return False
        if index == 3 and mood == "bad-json":
            writer.write(chunk("{not json"))
        if index == 3 and mood == "error-event":
            writer.write(chunk('{"error": {"message": "engine died"}}'))
        if mood == "empty":
            writer.write(event({"content": ""}))
        # The text of a token is the true time at which it was sent.
        writer.write(event({"content": f"{time.perf_counter():.6f} "}))
        due += INTERVAL * (SLOWER if reading else 1)
    writer.write(event({}, "length"))
    if mood != "no-usage":
        usage = {"prompt_tokens": len(words), "completion_tokens": count}
        if known is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": known}
        writer.write(chunk(json.dumps({"choices": [], "usage": usage})))
    writer.write(chunk("[DONE]") + b"0\r\n\r\n")
    return True


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=256)
    Path(sys.argv[1]).write_text(str(server.sockets[0].getsockname()[1]))
    async with server:
        await server.serve_forever()


asyncio.run(main())
