"""vLLM on one GPU or two: the same greedy tokens wherever experts are, and what a step takes.

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/serve_gpu.py --work /tmp/serve [--tokens]

Makes models of true expert shape (5120 x 2304, K = 3), one with a drawn router and one with a
decided one, and a tiny one, plans each case with the planner, and runs every case as a process of
its own: they load beside each other, and prove themselves. Then they take turns to measure what a
step takes beside the planner's prediction; or, with `--tokens`, to generate: twice, and where there
are slots with them being refilled between steps, and still again, with another proof (`--steps`:
and where there are none, to measure as well). Runs on the same ranks must agree to the token; of
the decided model two cards must say what one says, and something else when two experts of the last
rank have been swapped. Exit code 1 on a difference, a proof with problems, slots that did not move,
or a case that died. What is expected comes first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels"), str(REPO / "tests" / "gpu")]

from environment import leave, my_turn, run_cases, say  # noqa: E402
from same_tokens import verdict  # noqa: E402
from served import TEXTS, Case, Engine, known_answers, prepare, specs  # noqa: E402

# Rules by which slots never rest: every step swaps, and what is hot changes every few rows.
RESTLESS = {"promotions_per_row": 4.0, "hysteresis": 1.0, "deviations": 0.0, "half_life_rows": 32.0}
STILL = {"promotions_per_row": 0.0}
CASES = {
    "resident": Case("large", 0.0),
    "half": Case("large", 0.5),
    "host": Case("large", 1.0),
    "half-eager": Case("large", 0.5, eager=True),
    "slots": Case("large", 0.75, slots=16),
    "slots-eager": Case("large", 0.75, slots=16, eager=True),
    "decided": Case("decided", 0.3),
    "tiny": Case("tiny", 0.5),
    "tiny-slots": Case("tiny", 0.75, slots=4),
    "resident-tp2": Case("large", 0.0, ranks=2),
    "half-tp2": Case("large", 0.5, ranks=2),
    "slots-tp2": Case("large", 0.75, ranks=2, slots=16),
    "half-ep2": Case("large", 0.5, ranks=2, expert_parallel=True),
    "slots-ep2": Case("large", 0.75, ranks=2, expert_parallel=True, slots=8),
    "host-tp2": Case("large", 1.0, ranks=2),
    "decided-tp2": Case("decided", 0.3, ranks=2),
    "decided-ep2": Case("decided", 0.3, ranks=2, expert_parallel=True),
    "decided-half-ep2": Case("decided", 0.5, ranks=2, expert_parallel=True),
    "decided-slots-tp2": Case("decided", 0.5, ranks=2, slots=12),
    "decided-slots-ep2": Case("decided", 0.5, ranks=2, expert_parallel=True, slots=6),
    "tiny-tp2": Case("tiny", 0.5, ranks=2),
    "tiny-ep2": Case("tiny", 0.5, ranks=2, expert_parallel=True),
    "tiny-slots-tp2": Case("tiny", 0.75, ranks=2, slots=4),
    "tiny-slots-ep2": Case("tiny", 0.75, ranks=2, expert_parallel=True, slots=4),
}
PREDICTED = {
    "tokens": "equal in all cases and runs on the same ranks: slots none, still, moving",
    "proofs": "no problem, before the first token and after promotions",
    "decided model": "two cards as one: 4,096 and 2,048 tokens, parting in at most a fifth of the "
    "texts and only where one card leads by 0.05 or less (TP 2 and EP 2 among themselves: 10 and 3 "
    "of 64, at 0 to 0.031); leads moved by at most 0.1; 1,300 and 990 tokens and 2 and 17 whole "
    "texts of which one card is sure, all equal. With two experts swapped on the last rank more "
    "than half of the texts part, most where one card is sure",
    "drawn model, two cards": "late, some texts part: experts are nearly tied",
    "steps": "within 10 % of the planner's at 1 and 4 streams (predicted_ms of each case). With 4 "
    "layers over two ranks one stream is the engine's own time, 2.0 to 2.7 ms, for 2.40: take 16. "
    "With --tokens it shares its client's process, and one stream takes 2.3 to 2.9",
    "known answers of the tiny model": "all, while its slots move, too",
}


def child(a: Any, name: str) -> None:
    case, began = CASES[name], time.perf_counter()
    engine = Engine(a, name, case)
    facts: dict[str, Any] = {"case": name, "share": case.share, "eager": case.eager}
    facts |= {"ranks": case.ranks, "expert_parallel": case.expert_parallel, **engine.plan}
    facts["load_s"] = engine.load_s
    facts["homes"] = [state["homes"] for state in engine.states()]
    facts["host_pages"] = [state["host_pages"] for state in engine.states()]
    facts["proof"], facts["runs"] = engine.prove(), []
    # Tokens in turn, too: ranks of six engines on two cards waited for each other's time slices.
    turn = my_turn(a.work, name, a.beside)
    began_turn = time.perf_counter()
    if a.tokens:
        facts |= generated(a, engine, case)
        facts["tokens_s"] = round(time.perf_counter() - began_turn, 1)
    if case.model != "tiny" and (not a.tokens or (a.steps and not case.slots)):
        facts["decode"] = [engine.decode(streams) for streams in (1, 4)]
    if not a.tokens:
        facts["prefill"] = engine.prefill(4, 2000)
    facts["seconds"] = round(time.perf_counter() - began, 1)
    say(**facts | {key: list(map(without_texts, facts.get(key, []))) for key in ("runs", "wrong")})
    (a.work / f"{name}.part").write_text(json.dumps(facts))
    (a.work / f"{name}.part").rename(a.work / f"{name}.json")
    del turn
    leave()


def generated(a: Any, engine: Engine, case: Case) -> dict[str, Any]:
    """What a case generates. Twice, so that what differs by itself is not taken for slots'."""
    facts: dict[str, Any] = {}
    facts["runs"] = [engine.texts("still" if case.slots else "none", STILL) for _ in range(2)]
    if case.slots:
        facts["runs"].append(engine.texts("moving", RESTLESS))
        facts["proof_after"] = engine.prove()
        facts["runs"].append(engine.texts("still again", STILL))
    elif case.model == "decided":
        facts["swapped"] = engine.ask("cache_swap_two")
        facts["wrong"] = [engine.texts("two experts swapped", STILL)]
        engine.ask("cache_swap_two")
    if case.model == "tiny":
        if case.slots:
            engine.ask("cache_rules", RESTLESS)
        facts |= known_answers(engine, a.work / case.model)
    return facts


def without_texts(run: dict[str, Any]) -> dict[str, Any]:
    hidden = {f"{what}{more}" for what in TEXTS for more in ("", "_leads", "_rows")}
    return {key: value for key, value in run.items() if key not in hidden}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=64, help="of each layer")
    parser.add_argument("--layers", type=int, default=4, help="of the models of true shape")
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="instead of all of --ranks")
    parser.add_argument("--ranks", type=int, default=1, help="2: also cases over two GPUs")
    parser.add_argument("--expert-parallel", action="store_true", help="of those, EP instead of TP")
    parser.add_argument("--tokens", action="store_true", help="instead of times")
    parser.add_argument("--steps", action="store_true", help="after tokens, and without slots")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for all cases")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try it")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="float16",
                        help="of the models of true shape on GPUs")  # fmt: skip
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--beside", nargs="+", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help="only make the checkpoints")
    a = parser.parse_args()
    if a.case:
        child(a, a.case)
    a.only = a.only or [
        name
        for name, case in CASES.items()
        if case.ranks == 1 or (case.ranks <= a.ranks and case.expert_parallel == a.expert_parallel)
    ]
    say(predicted=PREDICTED)
    a.work.mkdir(parents=True, exist_ok=True)
    models = specs(a.experts, a.layers, small=a.device == "cpu")
    prepare(a.work, {name: models[name] for name in {CASES[case].model for case in a.only}})
    if a.make:
        return 0
    for case in a.only:
        (a.work / f"{case}.json").unlink(missing_ok=True)
    # In one process requests are all there before the first step: steps are composed the same each
    # time. For times the engine is a process of its own, as where it serves.
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if a.tokens else {}
    run_cases(a.only, a.work, a.limit, together=True, **alone)
    files = {case: a.work / f"{case}.json" for case in a.only}
    found = {case: json.loads(file.read_text()) for case, file in files.items() if file.exists()}
    return 0 if verdict(CASES, found, len(a.only)) else 1


if __name__ == "__main__":
    sys.exit(main())
