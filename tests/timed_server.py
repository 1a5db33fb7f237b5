"""An OpenAI-compatible server that sends token i at a known time, in its own process.

    python timed_server.py PORT_FILE INTERVAL_MS FIRST_MS

It paces each stream on an absolute schedule and writes the true times (the same monotonic clock as
the client's) into each event, so a client's own delay is the difference. What the request's `model`
says makes it misbehave: http-429, reset, cut-off, hang, no-usage, empty, bad-json, error-event.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

INTERVAL, FIRST = float(sys.argv[2]) / 1e3, float(sys.argv[3]) / 1e3
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
HEAD += b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def chunk(payload: str) -> bytes:
    data = f"data: {payload}\n\n".encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(delta: dict[str, str], finish: str | None = None) -> bytes:
    return chunk(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"POST"):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        asked = json.loads(await reader.readexactly(size))
        await answer(asked, asked["model"], writer)
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the client has gone
    finally:
        writer.close()


async def answer(asked: dict, mood: str, writer: asyncio.StreamWriter) -> None:
    if mood == "http-429":
        body = b'{"error": {"message": "too many requests"}}'
        writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return
    writer.write(HEAD + event({"role": "assistant", "content": ""}))
    count = asked.get("max_tokens") or asked["max_completion_tokens"]
    due = time.perf_counter() + FIRST
    for index in range(count):
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if writer.transport.is_closing():
            return
        if index == 3 and mood == "reset":
            writer.transport.abort()
        if index == 3 and mood == "hang":
            await asyncio.sleep(3600)
        if index == 3 and mood in ("reset", "cut-off"):
            return
        if index == 3 and mood == "bad-json":
            writer.write(chunk("{not json"))
        if index == 3 and mood == "error-event":
            writer.write(chunk('{"error": {"message": "engine died"}}'))
        if mood == "empty":
            writer.write(event({"content": ""}))
        # The text of a token is the true time at which it was sent.
        writer.write(event({"content": f"{time.perf_counter():.6f} "}))
        due += INTERVAL
    writer.write(event({}, "length"))
    if mood != "no-usage":
        words = sum(len(str(m["content"]).split()) for m in asked["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": count}
        writer.write(chunk(json.dumps({"choices": [], "usage": usage})))
    writer.write(chunk("[DONE]") + b"0\r\n\r\n")


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=256)
    Path(sys.argv[1]).write_text(str(server.sockets[0].getsockname()[1]))
    async with server:
        await server.serve_forever()


asyncio.run(main())
