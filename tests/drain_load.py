"""Many clients at once, and what became of each of their requests, token by token."""

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable

# What may become of a request: the last is the one that must never be.
FINISHED, REFUSED, UNREACHABLE, TRUNCATED = "finished", "refused", "unreachable", "truncated"


def ask(host: str, port: int, key: str, body: dict, whole: Callable[[str], bool]) -> str:
    """One streamed request. Accepted is what was answered 200: it must be `whole`."""
    connection = http.client.HTTPConnection(host, port, timeout=300)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
    except (OSError, http.client.HTTPException):
        return UNREACHABLE
    try:
        text = answer.read().decode()
    except (OSError, http.client.HTTPException):
        return TRUNCATED
    finally:
        connection.close()
    if answer.status == 503:
        return REFUSED if answer.headers["Retry-After"] else "503 without Retry-After"
    if answer.status != 200:
        return f"{answer.status}: {text[:100]}"
    return FINISHED if whole(text) else TRUNCATED


def send(
    count: int, threads: int, one: Callable[[], str], after: Callable[[int], None]
) -> Counter[str]:
    """`count` requests from so many clients; `after(n)` is told when n have come to an end."""
    outcomes: Counter[str] = Counter()
    started = iter(range(count))
    lock = threading.Lock()

    def client() -> None:
        while True:
            with lock:
                if next(started, None) is None:
                    return
            outcome = one()
            with lock:
                outcomes[outcome] += 1
                after(outcomes.total())

    running = [threading.Thread(target=client) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return outcomes
