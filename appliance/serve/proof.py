"""Proof before ready: placement, known answers, forward progress. All three over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from appliance.errors import ServeError
from appliance.serve.answers import Expectation
from appliance.serve.client import Client

PROGRESS_METRIC = "vllm:iteration_tokens_total_count"
PROOF_SECONDS = 1800.0  # samples are read again from the shards; a slow disk may take this long
ANSWER_SECONDS = 600.0


@dataclass(frozen=True)
class Proof:
    """What was proved. `answers` is None where the checkpoint ships no expectations."""

    ranks: int
    samples: int
    answers: int | None


def prove(
    client: Client,
    served_name: str,
    expectations: tuple[Expectation, ...] | None,
    clear_lead: float,
    tell: Callable[[str], None],
) -> Proof:
    """Raises ServeError with what the engine got wrong; the counters are at zero afterwards."""
    tell("reading every home and sampled experts back")
    answer = client.post("/appliance/prove", timeout_seconds=PROOF_SECONDS)
    samples = _require_ranks_ok(answer)
    before = _progress(client)
    for number, one in enumerate(expectations or (), 1):
        tell(f"known answer {number} of {len(expectations or ())}")
        _require_answer(client, served_name, one, number, clear_lead)
    if expectations is None:
        _complete(client, served_name, prompt=(1, 2, 3), count=2)
    after = _progress(client)
    if after <= before:
        raise ServeError(
            f"the engine answers but counts no progress: {PROGRESS_METRIC} stays at {after:.0f}"
        )
    client.post("/appliance/reset", timeout_seconds=ANSWER_SECONDS)
    return Proof(
        ranks=len(answer["ranks"]),
        samples=samples,
        answers=None if expectations is None else len(expectations),
    )


def _require_ranks_ok(answer: Any) -> int:
    """Samples compared, over all ranks. An answer without ranks or samples proves nothing."""
    try:
        ranks = answer["ranks"]
        bad = [list(rank["problems"]) for rank in ranks if rank["ok"] is not True]
        samples = sum(int(rank["samples"]) for rank in ranks)
    except (KeyError, TypeError, ValueError) as error:
        raise ServeError(f"the engine's proof cannot be read: {error!r}") from error
    if bad:
        problems = [problem for of_rank in bad for problem in of_rank]
        shown = "; ".join(str(problem) for problem in problems[:3]) or "no reason given"
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ServeError(f"the engine does not hold what the plan says: {shown}{more}")
    if not ranks or not samples:
        raise ServeError("the engine proved nothing: it compared no expert with the checkpoint")
    return samples


def _require_answer(
    client: Client, name: str, one: Expectation, number: int, clear_lead: float
) -> None:
    got = _complete(client, name, prompt=one.prompt, count=len(one.tokens))
    wrong = one.differs_at(got, clear_lead)
    if wrong is not None:
        raise ServeError(
            f"known answer {number} is wrong from token {wrong + 1} of {len(one.tokens)}:"
            f" expected {list(one.tokens[wrong : wrong + 4])}, got {list(got[wrong : wrong + 4])}",
            fix="the weights or the kernels are not right: do not use this engine's answers",
        )


def _complete(client: Client, name: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    body = {
        "model": name,
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = client.post("/v1/completions", body, timeout_seconds=ANSWER_SECONDS)
    try:
        return tuple(int(token) for token in answer["choices"][0]["token_ids"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServeError(f"/v1/completions answered without token ids: {error!r}") from error


def _progress(client: Client) -> float:
    value = client.metric(PROGRESS_METRIC)
    # The counter appears with the first step: until then there was none.
    return 0.0 if value is None else value
