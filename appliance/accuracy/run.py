"""Ask every item once, keep the answers and their scores, continue where it stopped.

    DIR/run.json        what was asked of whom: model, task and its sha256, item ids, sampling
    DIR/answers.jsonl   {"id", "answer", "score", "finish", "output_tokens"} a line, and "tokens"
                        where log-probabilities were asked for (tokens.py)

The same files of a reference API are reused offline: comparing needs no second call.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance import durable
from appliance.accuracy.scorers import score
from appliance.accuracy.tasks import Item, Task
from appliance.accuracy.tokens import TOP, Tokens, listed
from appliance.errors import ServeError, UsageError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
RUN, ANSWERS = "run.json", "answers.jsonl"
# Reasoning off and greedy: the same question must get the same answer tomorrow.
SAMPLING: Mapping[str, Any] = {
    "temperature": 0.0,
    "max_tokens": 1024,
    "chat_template_kwargs": {"enable_thinking": False},
}


def sampling(effort: str | None = None, *, logprobs: bool = False) -> dict[str, Any]:
    """What every request carries besides its question; `effort`: where the model has levels."""
    found = dict(SAMPLING)
    if effort is not None:
        found["reasoning_effort"] = effort
    if logprobs:
        found |= {"logprobs": True, "top_logprobs": TOP}
    return found


class Pinned(BaseModel):
    """What must be equal for a run to be continued. None: nobody could say."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    schema_version: Literal[1] = 1
    model: str
    task: str
    task_sha256: str
    seed: int
    items: tuple[str, ...]
    groups: tuple[str, ...]
    sampling: Mapping[str, Any]
    plan_digest: str | None = None
    weights_digest: str | None = None
    chat_template_sha256: str | None = None

    @classmethod
    def of(cls, task: Task, model: str, sampling: Mapping[str, Any], **digests: Any) -> Pinned:
        return cls(
            model=model,
            task=task.name,
            task_sha256=task.sha256,
            seed=task.seed,
            items=tuple(item.id for item in task.items),
            groups=tuple(item.group for item in task.items),
            sampling=sampling,
            **digests,
        )


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible chat API, `url` up to /v1; `tls` as of bench.client.Endpoint.

    On this host it is asked directly: a proxy would see the key, and would ask its own host.
    """

    url: str
    key: str | None
    timeout_seconds: float = 600.0
    tls: ssl.SSLContext | None = None

    def ask(self, model: str, prompt: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """answer, finish and output_tokens. Raises ServeError with the server's reason."""
        messages = [{"role": "user", "content": prompt}]
        body = json.dumps({"model": model, "messages": messages, **sampling}).encode()
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(f"{self.url}/chat/completions", body, headers)
        try:
            with self._opener.open(request, timeout=self.timeout_seconds) as answer:
                found = json.load(answer)
            choice = found["choices"][0]
            return {
                "answer": choice["message"]["content"] or "",
                "finish": choice["finish_reason"],
                "output_tokens": (found.get("usage") or {}).get("completion_tokens"),
                **({"tokens": listed(choice)} if sampling.get("logprobs") else {}),
            }
        except urllib.error.HTTPError as problem:
            reason = problem.read(300).decode(errors="replace")
            raise ServeError(f"{self.url} answered {problem.code}: {reason}") from problem
        except (
            OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError,
        ) as problem:  # fmt: skip
            raise ServeError(f"{self.url} gave no answer: {problem}") from problem

    @property
    def _opener(self) -> urllib.request.OpenerDirector:
        handlers: list[urllib.request.BaseHandler] = []
        if urlsplit(self.url).hostname in LOOPBACK:
            handlers.append(urllib.request.ProxyHandler({}))
        if self.tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=self.tls))
        return urllib.request.build_opener(*handlers)


def run_task(
    folder: Path,
    task: Task,
    pinned: Pinned,
    server: Server,
    python: str,
    streams: int,
    told: Callable[[int, int], None],
) -> dict[str, float]:
    """Scores by item id; items that were answered before are not asked again."""
    _pin(folder, pinned)
    have = {row["id"]: row["score"] for row in _answers(folder)}
    left = [item for item in task.items if item.id not in have]

    def one(item: Item) -> dict[str, Any]:
        found = server.ask(pinned.model, item.prompt, pinned.sampling)
        right = score(item, found["answer"], python, folder / "sandbox")
        return {"id": item.id, "score": right, **found}

    with ThreadPoolExecutor(streams) as pool:
        asked = [pool.submit(one, item) for item in left]
        try:
            for future in asked:
                row = future.result()
                _append(folder / ANSWERS, json.dumps(row))
                have[row["id"]] = row["score"]
                told(len(have), len(task.items))
        finally:
            pool.shutdown(cancel_futures=True)
    return have


def read_run(folder: Path) -> tuple[Pinned, dict[str, float]]:
    """What was asked, and the scores so far. Raises UsageError where there is no run."""
    try:
        pinned = Pinned.model_validate_json((folder / RUN).read_bytes())
    except FileNotFoundError as problem:
        raise UsageError(f"{folder} holds no run of a task: {RUN} is missing") from problem
    except ValidationError as problem:
        raise UsageError(f"{folder / RUN}: {problem.errors()[0]['msg']}") from problem
    return pinned, {row["id"]: row["score"] for row in _answers(folder)}


def read_tokens(folder: Path) -> dict[str, Tokens]:
    """Log-probabilities by item id, of the items that have them."""
    return {row["id"]: row["tokens"] for row in _answers(folder) if row.get("tokens")}


def same_items(a: Pinned, b: Pinned) -> dict[str, str]:
    """Group by item id, where both runs asked the same. Raises UsageError where they did not."""
    names = ("task", "task_sha256", "seed", "items", "sampling")
    differing = [name for name in names if getattr(a, name) != getattr(b, name)]
    if differing:
        raise UsageError(
            f"the runs differ in {', '.join(differing)}: answers do not compare",
            fix="run both with the same task file, --count, --seed and sampling",
        )
    return dict(zip(a.items, a.groups, strict=True))


def _pin(folder: Path, pinned: Pinned) -> None:
    if (folder / RUN).exists():
        found, _ = read_run(folder)
        changed = [n for n in Pinned.model_fields if getattr(found, n) != getattr(pinned, n)]
        if changed:
            raise UsageError(
                f"{folder} holds a run with another {', '.join(changed)}", fix="another --out"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    durable.write_file(folder / RUN, (pinned.model_dump_json(indent=1) + "\n").encode())


def _answers(folder: Path) -> Iterator[dict[str, Any]]:
    file = folder / ANSWERS
    if not file.exists():
        return
    content = file.read_text(encoding="utf-8")
    if not content.endswith("\n"):  # torn by a crash: that item is asked again
        content = content[: content.rfind("\n") + 1]
        file.write_text(content, encoding="utf-8")
    for line in content.splitlines():
        yield json.loads(line)


def _append(file: Path, line: str) -> None:
    with file.open("a", encoding="utf-8") as handle:
        handle.write(line + "\n")
        handle.flush()
        os.fsync(handle.fileno())
