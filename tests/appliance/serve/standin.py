"""A small quick server that plays the engine where a test needs one that fails.

Started by the real supervisor in place of vLLM's Python, with vLLM's arguments; the real gateway
is in front of it. STANDIN says what goes wrong. The true engine is served in tests/e2e.
"""

import asyncio
import json
import os
import signal
import sys

WRONG = os.environ.get("STANDIN", "")


def argument(name):
    return sys.argv[sys.argv.index(name) + 1]


class Engine:
    steps = 0
    resets = 0
    running = 0
    frozen = False  # what counts the queue hangs; what serves HTTP does not

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        route = getattr(self, scope["path"].strip("/").replace("/", "_"))
        status, answer = await route(json.loads(body or b"null"), send)
        if status is not None:
            raw = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": raw})

    async def health(self, _body, _send):
        return (503 if WRONG == "never healthy" else 200), {}

    async def appliance_prove(self, _body, _send):
        if WRONG == "dies while proving":
            print("RuntimeError: the arena is gone", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if WRONG == "hangs while proving":
            await asyncio.sleep(3600)
        problems = ["layer 1 expert 3 (host): bytes differ"] if WRONG == "bad homes" else []
        samples = 0 if WRONG == "proves nothing" else 4
        rank = {"rank": 0, "ok": not problems, "problems": problems, "samples": samples}
        return 200, {"ranks": [rank]}

    async def appliance_reset(self, _body, _send):
        self.resets += 1
        return 200, {}

    async def appliance_state(self, _body, _send):
        if self.frozen:
            await asyncio.sleep(3600)
        picks = {"device": 6, "slot": 0, "host": 2}
        rank = {"rank": 0, "resets": self.resets, "homes": {}, "picks": picks, "layers": {},
                "host_bytes_read": 2 << 20, "promotions": 0, "cache": None}  # fmt: skip
        return 200, {"ranks": [rank]}

    async def metrics(self, _body, _send):
        name = "vllm:iteration_tokens_total_count"
        queue = f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting 0\n"
        return 200, f'# TYPE x\n{name}{{engine="0"}} {float(self.steps)}\n{queue}'

    async def v1_completions(self, body, send):
        if WRONG == "freezes" and body.get("stream"):
            self.frozen = True
            await asyncio.sleep(3600)
        if WRONG != "no progress":
            self.steps += 1
        if body.get("stream"):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            self.running += 1
            for _ in range(body["max_tokens"]):
                self.steps += WRONG != "no progress"
                await send({"type": "http.response.body", "body": b"data: {}\n\n",
                            "more_body": True})  # fmt: skip
                await asyncio.sleep(0.05)
            self.running -= 1
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            return None, None
        # The "model" adds one to each token of the prompt, again and again.
        tokens = [token + 1 for token in body["prompt"]]
        tokens = (tokens * body["max_tokens"])[: body["max_tokens"]]
        if WRONG == "wrong tokens":
            tokens[-1] += 1
        return 200, {"choices": [{"text": "", "token_ids": tokens}]}


def main():
    if WRONG == "dies at start":
        print("(EngineCore pid=7) ERROR 11-29 10:00:00 [core.py:1] Traceback (most recent call):")
        print("(EngineCore pid=7) ERROR 11-29 10:00:00 [core.py:9] ValueError: No available memory")
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(1)
    import uvicorn

    from appliance.gateway import Gateway

    host, port = argument("--host"), int(argument("--port"))
    if WRONG == "ignores SIGTERM":
        uvicorn.Server.capture_signals = lambda self: __import__("contextlib").nullcontext()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tls = {}
    if "--ssl-certfile" in sys.argv:
        tls = {"ssl_certfile": argument("--ssl-certfile"), "ssl_keyfile": argument("--ssl-keyfile")}
    uvicorn.run(Gateway(Engine()), host=host, port=port, log_level="warning", **tls)


main()
