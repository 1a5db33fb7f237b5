"""What is kept of a request that passed: lengths, timings and which message is which; no text.

One line of each answered chat request, in the layout of samples.py: tokens by the server's usage,
times, and of each message only which one it is (a number that grows with each message not seen
before) and how many characters it has. Text is compared under a random key that is forgotten when
recording ends, and is written only where asked for.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.bench.client import Answer, usage_count


@dataclass
class Recorder:
    """Turns requests and answers into lines. `with_text` keeps what was said, too."""

    file: Path
    with_text: bool = False
    lines: int = 0
    without_usage: int = 0
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _numbers: dict[bytes, int] = field(default_factory=dict)
    _conversations: dict[tuple[int, ...], tuple[str, int]] = field(default_factory=dict)

    def keep(self, body: bytes, began: float, answer: Answer) -> None:
        """One line; a request that is no chat is not kept."""
        try:
            asked = json.loads(body)
            messages = [*_tools(asked), *asked["messages"]]
        except (ValueError, KeyError, TypeError):
            return
        pieces = [(self._number(message), _characters(message)) for message in messages]
        name, turn = self._place(tuple(number for number, _ in pieces))
        usage = answer.usage
        self.without_usage += usage_count(usage, "completion_tokens") is None
        about = {
            "conversation_id": name,
            "turn_index": turn,
            "request_start_ns": round(began * 1e9),
            "request_end_ns": round((began + answer.latency) * 1e9),
            "benchmark_phase": "profiling",
            "was_cancelled": answer.error == "client-left",
            "messages": pieces,
            "empty_chunks": answer.empty_chunks,
        }
        if self.with_text:
            about["text"] = {"request": asked, "answer": answer.text}
        detail = answer.detail if self.with_text else None
        error = None if answer.error is None else {"type": answer.error, "message": detail}
        line = {"metadata": about, "metrics": _metrics(answer), "error": error}
        # Whoever may read it knows who worked when, and with text on what.
        own = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(own, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")
        self.lines += 1

    def _number(self, message: Any) -> int:
        text = json.dumps(message, sort_keys=True).encode()
        digest = hmac.new(self._key, text, hashlib.sha256).digest()
        return self._numbers.setdefault(digest, len(self._numbers))

    def _place(self, numbers: tuple[int, ...]) -> tuple[str, int]:
        """The conversation that this one continues, by its longest known beginning."""
        for length in range(len(numbers) - 1, 0, -1):
            known = self._conversations.pop(numbers[:length], None)
            if known is not None:
                found = (known[0], known[1] + 1)
                break
        else:
            found = (f"c{len(self._numbers)}-{self.lines}", 0)
        self._conversations[numbers] = found
        return found


def _metrics(answer: Answer) -> dict[str, Any]:
    times = answer.token_times
    found = {
        "input_sequence_length": (usage_count(answer.usage, "prompt_tokens"), "tokens"),
        "output_sequence_length": (usage_count(answer.usage, "completion_tokens"), "tokens"),
        "cached_tokens": (
            usage_count(answer.usage, "prompt_tokens_details", "cached_tokens"), "tokens",
        ),
        "time_to_first_token": (round(times[0] * 1e3, 6) if times else None, "ms"),
        "request_latency": (round(answer.latency * 1e3, 6), "ms"),
        "inter_chunk_latency": (
            [round((b - a) * 1e3, 6) for a, b in itertools.pairwise(times)] or None, "ms",
        ),
    }  # fmt: skip
    return {
        name: {"value": value, "unit": unit}
        for name, (value, unit) in found.items()
        if value is not None
    }


def _tools(asked: Any) -> list[Any]:
    """Definitions of tools are part of the prompt, before the messages."""
    return [{"tools": asked["tools"]}] if asked.get("tools") else []


def _characters(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else message
    return len(content) if isinstance(content, str) else len(json.dumps(message))
