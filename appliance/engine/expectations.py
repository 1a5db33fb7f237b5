"""What a checkpoint must answer, worked out without vLLM and without our tables.

Every EXL3 linear is decoded to float32 with expert_kernels.reference, the result is loaded into
transformers' own model class on the CPU, and its greedy tokens are kept in the checkpoint's folder
as expectations.json, which appliance.serve.answers reads. Run in the engine's environment:

    python -m appliance.engine.expectations DIR

Engines add floats in different orders: vLLM's float32 logits differ from transformers' by up to
4e-5 here. So only prompts are kept whose every token leads the next best by CLEAR_LEAD, far above
that noise; engines in narrower types can use the leads to see which tokens they may miss.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance import durable
from appliance.engine.dense_twin import write_dense_twin
from appliance.errors import ApplianceError, CheckpointError

FILE = "expectations.json"
SCHEMA_VERSION = 1
TOKENS = 16
CLEAR_LEAD = 0.02
# One case is kept from each row: the first prompt whose answer is clear.
RAW = tuple(tuple(range(start, start + 24)) for start in (300, 330, 360, 390, 420, 450))
STATEMENTS = (
    "The machine keeps cold experts in host memory.",
    "A router sends each token to a few experts.",
    "Two cards share the layers of one model.",
    "Weights wait until a token asks for them.",
    "The link is slower than the memory of the card.",
    "Every expert has one home and one copy at most.",
)
QUESTIONS = (
    "Why is one layer slow, and which?",
    "Where does the next token go?",
    "How many bytes does an expert need?",
    "Who reads the book of counts?",
    "What happens when the table is full?",
    "When will the engine be ready?",
)


@dataclass(frozen=True, slots=True)
class Case:
    """Token ids of one prompt and of its greedy continuation; `source` says what the prompt is.

    `leads` are how far each token is ahead of the second best, in logits.
    """

    source: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    leads: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Expectations:
    """`smallest_lead` is the least of all leads."""

    cases: tuple[Case, ...]
    smallest_lead: float
    dtype: str
    made_with: dict[str, str]
    schema_version: int = SCHEMA_VERSION


def write_expectations(folder: Path, tokens: int = TOKENS) -> Expectations:
    """Work out `tokens` greedy tokens for each of four prompts, and keep them in `folder`.

    Raises CheckpointError if a row of prompts has none whose answer is clear.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="dense-twin-") as aside:
        twin = Path(aside) / "model"
        write_dense_twin(folder, twin)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            twin, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    cases = tuple(_clear_case(model, row, tokens) for row in _prompts(folder))
    result = Expectations(
        cases=cases,
        smallest_lead=min(min(case.leads) for case in cases),
        dtype="float32",
        made_with={
            "model_class": type(model).__name__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    )
    _keep(folder / FILE, json.dumps(asdict(result), indent=1) + "\n")
    return result


def greedy(model: Any, prompt: tuple[int, ...], tokens: int) -> tuple[list[int], list[float]]:
    """The `tokens` most likely next tokens, and the lead of each over the second best, in logits.

    The end token does not end it: a fixed number of tokens proves more.
    """
    import torch

    chosen, leads, cache = [], [], None
    step = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(tokens):
            out = model(input_ids=step, past_key_values=cache, use_cache=True)
            best = out.logits[0, -1].topk(2)
            chosen.append(int(best.indices[0]))
            leads.append(float(best.values[0] - best.values[1]))
            cache, step = out.past_key_values, best.indices[None, :1]
    return chosen, leads


def _clear_case(model: Any, row: list[tuple[str, tuple[int, ...]]], tokens: int) -> Case:
    best = 0.0
    for source, prompt in row:
        chosen, leads = greedy(model, prompt, tokens)
        if min(leads) >= CLEAR_LEAD:
            return Case(source, prompt, tuple(chosen), tuple(round(lead, 4) for lead in leads))
        best = max(best, min(leads))
    raise CheckpointError(
        f"none of {len(row)} prompts has {tokens} clear tokens: the best has one that leads by "
        f"{best:.4f}, and {CLEAR_LEAD} is asked",
        fix="another seed, or fewer tokens",
    )


def _prompts(folder: Path) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Rows of (what the prompt is, token ids): plain ids, text, text, and chat."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    yield [("token ids", ids) for ids in RAW]
    for texts in (STATEMENTS, QUESTIONS):
        yield [(text, tuple(tokenizer(text)["input_ids"])) for text in texts]
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    yield [
        (
            json.dumps(chat),
            tuple(
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
                    "input_ids"
                ]
            ),
        )
        for chat in chats
    ]


def _keep(path: Path, text: str) -> None:
    durable.write_file(path, text.encode())


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m appliance.engine.expectations DIR")
    import torch

    torch.set_num_threads(1)  # small matrices: a second thread waits more than it works
    try:
        write_expectations(Path(sys.argv[1]))
    except ApplianceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
