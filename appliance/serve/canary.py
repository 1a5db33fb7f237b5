"""Is a running appliance fit for use, seen from where its clients are?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from appliance.errors import CheckFailed, ServeError
from appliance.serve.client import Client
from appliance.serve.keys import first_key

QUESTION = "Say one word."
TOKENS = 16
LIMIT_SECONDS = 120.0


def ask_twice(host: str, port: int, keys: Path, certificate: Path | None = None) -> int:
    """How many tokens both answers had. Raises CheckFailed with what was not as it must be."""
    client = Client(host, port, first_key(keys), certificate, LIMIT_SECONDS, dated=True)
    name = client.get("/v1/models")["data"][0]["id"]
    first, second = (_answer(client, name) for _ in range(2))
    if not first["usage"]["completion_tokens"]:
        raise CheckFailed(f"{name} answered without a token")
    if first["choices"][0]["message"] != second["choices"][0]["message"]:
        raise CheckFailed(f"{name} gave two different greedy answers to the same question")
    try:
        Client(host, port, "no-key", certificate).get("/v1/models")
    except ServeError as error:
        if "401" not in error.message:
            raise CheckFailed(f"a wrong key was not refused as one: {error.message}") from error
    else:
        raise CheckFailed("it answers without a valid key")
    return int(first["usage"]["completion_tokens"])


def _answer(client: Client, name: str) -> Any:
    body = {
        "model": name,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    return client.post("/v1/chat/completions", body)
