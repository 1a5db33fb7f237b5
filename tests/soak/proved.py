"""`upgrade run --prove` on the real CPU engine: python tests/soak/proved.py

Two upgrades to the same model must pass their proof; one to a model whose answers differ must be
sent back by accuracy, one to a model of three times the layers by speed. Alone on the machine: what
else runs is measured, too, and a new neighbour is indistinguishable from a slower release.

A random model has no right answers to lose, so the questions are made of what the first one
answers: each item wants the longest word of its own answer. Prints a line for each upgrade.
"""

import json
import re
import sys
import tempfile
import time
from pathlib import Path

from upgrades import Lab, environment_of

ITEMS, TURNS, STREAMS = 90, 160, 2  # a proof of answers takes 73 items or more
SHAPE = {
    "system_tokens": 40,
    "turns": {"median": 3, "p95": 5, "least": 2, "most": 6},
    "input_tokens": {"median": 20, "p95": 50, "least": 8, "most": 60},
    "short_output_tokens": {"median": 24, "p95": 32, "least": 17, "most": 40},
    "long_share": 0,
    "most_context_tokens": 500,
}
MODELS = {
    "a": ("--seed", "1", "--layers", "2"),
    "other": ("--seed", "2", "--layers", "2"),
    "deep": ("--seed", "1", "--layers", "6"),
}


def question(number: int) -> str:
    return f"Write about harbour number {number}."


def task(file: Path, words: dict[int, str]) -> Path:
    """Items in IFEval's format; each wants its word."""
    rows = (
        {"key": number, "prompt": question(number), "instruction_id_list": ["keywords:existence"],
         "kwargs": [{"keywords": [word]}]}
        for number, word in words.items()
    )  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def own_words(lab: Lab) -> dict[int, str]:
    """What the serving model answers, the longest word of each."""
    asked, out = lab.folder / "asked.jsonl", lab.folder / "asked"
    task(asked, dict.fromkeys(range(ITEMS), "harbour"))
    code, text = lab.run("accuracy", "run", str(asked), "--out", str(out), "--count", str(ITEMS))
    assert code == 0, text
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    found = {
        int(row["id"].split("/")[-1]): re.findall(r"[a-z]{3,}", row["answer"].lower())
        for row in rows
    }
    return {number: max(words, key=len) for number, words in found.items() if words}


def upgrade(lab: Lab, model: str, proofs: list[str], wanted: int) -> bool:
    started = time.monotonic()
    words = [word for proof in proofs for word in ("--prove", proof)]
    code, text = lab.run("upgrade", "run", "--model", str(lab.folder / model), "--release", model,
                         *words)  # fmt: skip
    said = [line for line in text.splitlines() if " -> " in line or "p5 of" in line]
    serving = lab.json("upgrade", "history")["current"]["model"]
    canary, _ = lab.run("canary", "127.0.0.1", lab.environment["APPLIANCE_PORT"])
    right = code == wanted and canary == 0 and serving.endswith("/a")
    print(f"to {model}: exit {code} after {time.monotonic() - started:.0f} s, {Path(serving).name} "
          f"serves, canary {canary}: {'fine' if right else 'WRONG'}", flush=True)  # fmt: skip
    for line in said if right else text.splitlines()[-12:]:
        print(f"    {line.strip()}", flush=True)
    return right


def main(folder: Path) -> int:
    lab = Lab(folder, {**environment_of(folder), "APPLIANCE_PORT": "18400",
                       "APPLIANCE_DRAIN_SECONDS": "20"})  # fmt: skip
    for name, words in MODELS.items():
        code, text = lab.run("weights", "synth", str(folder / name), "--known-answers", *words)
        assert code == 0, text
    try:
        code, text = lab.run("up", "--detach", "--model", str(folder / "a"), "--context", "2048",
                             "--streams", "4", "--name", "model")  # fmt: skip
        assert code == 0, text
        wanted = own_words(lab)
        print(f"{len(wanted)} of {ITEMS} answers have a word to ask for", flush=True)
        (folder / "shape.json").write_text(json.dumps(SHAPE))
        answers = f"accuracy:{len(wanted)}:{task(folder / 'own.jsonl', wanted)}"
        speed = f"speed:{STREAMS}:{TURNS}:{folder / 'shape.json'}"
        good = [
            upgrade(lab, "a", [answers], 0),
            upgrade(lab, "a", [speed], 0),
            upgrade(lab, "other", [answers], 3),
            upgrade(lab, "deep", [speed], 3),
        ]
    finally:
        lab.run("down")
    return 0 if all(good) else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(main(Path(scratch)))
