"""Our client and vLLM's own `vllm bench serve` on one server of known timing, in turns.

PYTHONPATH=.:kernels:tests python tests/peer_model.py TOKENIZER     # for its tokenizer
PYTHONPATH=.:kernels:tests python tests/bench_agreement.py TOKENIZER [FIRST_MS]

32 requests of 64 tokens, 4 at once, 20 ms between tokens, 5 runs of each.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from appliance.bench.client import Answer, Endpoint, ask

REQUESTS, TOKENS, AT_ONCE, INTERVAL_MS, RUNS = 32, 64, 4, 20.0, 5
Medians = tuple[float, float]


def ours(url: str) -> Medians:
    async def all_of_them() -> list[Answer]:
        free = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> Answer:
            async with free:
                asked = [{"role": "user", "content": f"{number} " * 100}]
                return await ask(Endpoint(url, "fine", extra={}), asked, TOKENS)

        return await asyncio.gather(*map(one, range(REQUESTS)))

    answers = asyncio.run(all_of_them())
    assert all(answer.error is None for answer in answers)
    first = statistics.median(answer.token_times[0] for answer in answers)
    each = statistics.median((a.token_times[-1] - a.token_times[0]) / (TOKENS - 1) for a in answers)
    return first * 1e3, each * 1e3


def theirs(worker: subprocess.Popen[str]) -> Medians:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write("run\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("medians "):
            first, each = map(float, line.split()[1:])
            return first, each
    raise RuntimeError("vllm bench serve ended")


def work(url: str, tokenizer: str) -> None:
    """`vllm bench serve` by its own parser and main, imported once, run at every line of stdin."""
    from vllm.benchmarks.serve import add_cli_args, main_async

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    words = (
        f"--backend openai-chat --base-url {url.removesuffix('/v1')} --model fine "
        f"--endpoint /v1/chat/completions --tokenizer {tokenizer} --dataset-name random "
        f"--random-input-len 100 --random-output-len {TOKENS} --num-prompts {REQUESTS} "
        f"--max-concurrency {AT_ONCE} --disable-tqdm"
    )
    for _ in sys.stdin:
        found = asyncio.run(main_async(parser.parse_args(words.split())))
        assert found["completed"] == REQUESTS
        print("\nmedians", found["median_ttft_ms"], found["median_tpot_ms"], flush=True)


def main(tokenizer: str, first_ms: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        port = Path(folder) / "port"
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("timed_server.py")), str(port),
             str(INTERVAL_MS), str(first_ms)]
        )  # fmt: skip
        try:
            while not (port.exists() and port.read_text()):
                time.sleep(0.05)
            url = f"http://127.0.0.1:{port.read_text()}/v1"
            worker = subprocess.Popen(
                [sys.executable, __file__, "--work", url, tokenizer], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )  # fmt: skip
            theirs(worker)  # the first one imports
            pairs = []
            for run in range(RUNS):
                pairs.append((ours(url), theirs(worker)))
                (a, b), (c, d) = pairs[-1]
                load = os.getloadavg()[0]
                said = f"first {a:.2f} {c:.2f}, per token {b:.3f} {d:.3f} ms"
                print(f"run {run}: {said}; load {load:.1f}")
            worker.terminate()
            worker.wait()
        finally:
            server.terminate()
            server.wait()
    for name, at in (("first token", 0), ("per token", 1)):
        our, their = (statistics.median(pair[side][at] for pair in pairs) for side in (0, 1))
        print(f"{name}: ours {our:.3f}, vllm bench serve {their:.3f} ms: {our / their - 1:+.2%}")


if __name__ == "__main__":
    if sys.argv[1] == "--work":
        work(*sys.argv[2:])
        sys.exit()
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 50.0)
