"""Known answers: what greedy decoding must make of a prompt, worked out without the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance import process
from appliance.errors import ServeError
from appliance.serve import log

EXPECTATIONS_FILE = "expectations.json"
EXPECTATIONS_VERSION = 1


@dataclass(frozen=True)
class Expectation:
    """A prompt and what greedy decoding must make of it, both as token ids.

    `leads`: how far each token is ahead of the second best, in logits of the float32 reference.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    leads: tuple[float, ...]

    def differs_at(self, got: tuple[int, ...], clear_lead: float) -> int | None:
        """Index of the first wrong token; None where there is none.

        A token whose lead is below `clear_lead` may fall the other way in a narrower type; what
        follows it is then another text and says nothing.
        """
        for index, (token, lead) in enumerate(zip(self.tokens, self.leads, strict=True)):
            if index >= len(got) or (got[index] != token and lead >= clear_lead):
                return index
            if got[index] != token:
                return None
        return None if len(got) == len(self.tokens) else len(self.tokens)


def read_expectations(model: Path) -> tuple[Expectation, ...] | None:
    """The checkpoint's known answers, None where it ships none. Raises ServeError on bad ones."""
    path = model / EXPECTATIONS_FILE
    fix = "make the known answers again, or remove the file: then answers count as unproved"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema_version"] != EXPECTATIONS_VERSION:
            raise ServeError(
                f"{path} has schema version {data['schema_version']!r};"
                f" this release reads {EXPECTATIONS_VERSION}",
                fix=fix,
            )
        found = tuple(_expectation(case) for case in data["cases"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServeError(f"cannot read the known answers in {path}: {error!r}", fix=fix) from error
    if not found:
        raise ServeError(f"{path} holds no known answer", fix=fix)
    return found


def _expectation(case: Any) -> Expectation:
    """Raises ValueError, KeyError or TypeError where the case is not one."""
    made = Expectation(
        prompt=tuple(int(token) for token in case["prompt"]),
        tokens=tuple(int(token) for token in case["tokens"]),
        leads=tuple(float(lead) for lead in case["leads"]),
    )
    if not made.prompt or not made.tokens or len(made.leads) != len(made.tokens):
        raise ValueError("a case without prompt, tokens or one lead a token")
    return made


def make_expectations(model: Path, python: str, inherited: Mapping[str, str], output: Path) -> None:
    """Have the engine's Python work out known answers, and keep them in the checkpoint's folder.

    Takes about 20 s for a small model (imports, mostly). Raises ServeError with the reason.
    """
    argv = [python, "-P", "-m", "appliance.engine.expectations", str(model)]
    try:
        code = process.run(argv, environment={**inherited, "HF_HUB_OFFLINE": "1"}, log=output)
    except OSError as error:
        raise ServeError(f"cannot start {python}: {error.strerror}") from error
    if code != 0:
        reason = log.cause(output) or " ".join(log.tail(output, 1)) or log.exit_words(code)
        raise ServeError(f"no known answers for {model}: {reason}", fix=f"read {output}")
