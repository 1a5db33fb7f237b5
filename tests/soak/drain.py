"""The real CPU engine under 1,000 requests while it drains, and under a long prefill.

    python tests/soak/drain.py [REQUESTS]

Every accepted request must finish with all its tokens, every other be told 503 with Retry-After or
find nobody. A prefill of 20 s or more must not be taken for a hang: the agent watches meanwhile.
"""

import json
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "soak")]

from drain_load import FINISHED, REFUSED, TRUNCATED, UNREACHABLE, ask, send  # noqa: E402
from upgrades import Lab, environment_of  # noqa: E402

PORT, AGENT_PORT, TOKENS = 18500, 18501, 4
LONG_SECONDS = 20.0


def whole(tokens: int):
    def check(text: str) -> bool:
        events = [json.loads(line[6:]) for line in text.splitlines()
                  if line.startswith("data: {")]  # fmt: skip
        usage = [event["usage"] for event in events if event.get("usage")]
        return (
            text.rstrip().endswith("data: [DONE]")
            and bool(usage)
            and (usage[-1]["completion_tokens"] == tokens)
        )

    return check


def body(prompt: list[int], tokens: int) -> dict:
    return {"model": "a", "prompt": prompt, "max_tokens": tokens, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip


def live() -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{AGENT_PORT}/livez", timeout=10) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def long_prefill(key: str, context: int) -> bool:
    """Prompts as long as they may be, twice as many each time, until reading them takes 20 s."""
    seen: set[int] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            seen.add(live()[0])

    watching = threading.Thread(target=watch)
    watching.start()
    count, took, length = 1, 0.0, context - 8
    outcomes = [FINISHED]
    while took < LONG_SECONDS and count <= 64 and set(outcomes) == {FINISHED}:
        prompts = [
            [4 + (7 * i + 31 * number + 97 * count) % 900 for i in range(length)]
            for number in range(count)
        ]
        started = time.monotonic()
        with ThreadPoolExecutor(count) as readers:
            asked = partial(ask, "127.0.0.1", PORT, key, whole=whole(1))
            outcomes = list(readers.map(asked, [body(prompt, 1) for prompt in prompts]))
        took = time.monotonic() - started
        print(f"{count} prompts of {length} tokens read: {outcomes} in {took:.1f} s", flush=True)
        count *= 2
    over.set()
    watching.join()
    restarts = live()[1]["restarts"]
    print(f"/livez said {sorted(seen)} all along, {restarts} restarts")
    fine = set(outcomes) == {FINISHED} and took >= LONG_SECONDS
    return fine and seen == {200} and restarts == 0


def drained(lab: Lab, key: str, count: int) -> bool:
    halted = threading.Event()

    def after(done: int) -> None:
        if done == count // 4 and not halted.is_set():
            halted.set()
            threading.Thread(target=lab.run, args=("down",)).start()

    prompts = iter(range(count * 2))

    def one() -> str:
        return ask("127.0.0.1", PORT, key, body([4 + next(prompts) % 900, 7, 9], TOKENS),
                   whole(TOKENS))  # fmt: skip

    # One long answer keeps the drain going while the others come.
    long_one: list[str] = []
    asked = body([5, 6], 1500)
    long = threading.Thread(
        target=lambda: long_one.append(ask("127.0.0.1", PORT, key, asked, whole(1500)))
    )
    long.start()
    started = time.monotonic()
    outcomes = send(count, 16, one, after)
    long.join()
    print(f"{count} requests in {time.monotonic() - started:.0f} s, stopped after {count // 4}:"
          f" {dict(outcomes)}; the long one: {long_one[0]}")  # fmt: skip
    fine = set(outcomes) <= {FINISHED, REFUSED, UNREACHABLE} and outcomes[TRUNCATED] == 0
    return fine and outcomes[REFUSED] > 0 and long_one == [FINISHED]


def main(count: int, folder: Path) -> int:
    lab = Lab(folder, {
        **environment_of(folder), "APPLIANCE_PORT": str(PORT), "APPLIANCE_DRAIN_SECONDS": "600",
        "APPLIANCE_AGENT_PORT": str(AGENT_PORT),
    })  # fmt: skip
    code, text = lab.run("weights", "synth", str(folder / "a"))
    assert code == 0, text
    context = 8192
    code, text = lab.run("up", "--detach", "--model", str(folder / "a"), "--name", "a",
                         "--context", str(context), "--streams", "8")  # fmt: skip
    assert code == 0, text
    key = (lab.state / "keys").read_text().split()[0]
    try:
        fine = [long_prefill(key, context), drained(lab, key, count)]
    finally:
        lab.run("down")
    print("fine" if all(fine) else f"WRONG: prefill {fine[0]}, drain {fine[1]}")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, Path(scratch)))
