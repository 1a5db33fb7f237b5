"""vLLM on one GPU or two: the same greedy tokens wherever experts are, and what a step takes.

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/serve_gpu.py --work /tmp/serve [--tokens]

Makes a model of true expert shapes (5120 x 2304, K = 3) and a tiny one, plans each case with the
planner, and runs every case as a process of its own: they load beside each other, and prove
themselves. Then they take turns to measure what a step takes beside the planner's prediction; or,
with `--tokens`, generate: twice, and where there are slots with them being refilled between steps,
and still again, with another proof (`--steps`: and then take turns all the same). Runs on the same
ranks must agree to the token. Exit code 1 on a difference, a proof with problems, slots that did
not move, or a case that died. What is expected comes first.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels"), str(REPO / "tests" / "gpu")]

from environment import leave, my_turn, run_cases, say  # noqa: E402

LINK = 51e9  # bytes a second that kernels read from host memory (FACTS section 3)
CAPTURE = [1, 2, 4, 8]
TEXTS = {"tokens": (24, 64), "tokens_long": (600, 32)}  # of a prompt, and greedily after it
# Rules by which slots never rest: every step swaps, and what is hot changes every few rows.
RESTLESS = {"promotions_per_row": 4.0, "hysteresis": 1.0, "deviations": 0.0, "half_life_rows": 8.0}
STILL = {"promotions_per_row": 0.0}


@dataclass(frozen=True)
class Case:
    model: str
    share: float  # of the experts whose home is the host
    eager: bool = False
    ranks: int = 1
    expert_parallel: bool = False
    slots: int = 0  # a layer

    @property
    def group(self) -> tuple[str, int, bool]:
        """Cases of one group add up in the same order."""
        return self.model, self.ranks, self.expert_parallel


CASES = {
    "resident": Case("large", 0.0),
    "half": Case("large", 0.5),
    "host": Case("large", 1.0),
    "half-eager": Case("large", 0.5, eager=True),
    "slots": Case("large", 0.75, slots=16),
    "slots-eager": Case("large", 0.75, slots=16, eager=True),
    "tiny": Case("tiny", 0.5),
    "tiny-slots": Case("tiny", 0.75, slots=4),
    "resident-tp2": Case("large", 0.0, ranks=2),
    "half-tp2": Case("large", 0.5, ranks=2),
    "slots-tp2": Case("large", 0.75, ranks=2, slots=16),
    "half-ep2": Case("large", 0.5, ranks=2, expert_parallel=True),
    "slots-ep2": Case("large", 0.75, ranks=2, expert_parallel=True, slots=8),
    "host-tp2": Case("large", 1.0, ranks=2),
    "tiny-tp2": Case("tiny", 0.5, ranks=2),
    "tiny-ep2": Case("tiny", 0.5, ranks=2, expert_parallel=True),
    "tiny-slots-tp2": Case("tiny", 0.75, ranks=2, slots=4),
    "tiny-slots-ep2": Case("tiny", 0.75, ranks=2, expert_parallel=True, slots=4),
}


def specs(experts: int) -> dict[str, Any]:
    from appliance.checkpoint.synth import SynthSpec

    large = SynthSpec(
        layers=4, dense_layers=0, hidden_size=5120, intermediate_size=2304, experts=experts,
        top_k=6, heads=32, kv_heads=8,
    )  # fmt: skip
    return {"large": large, "tiny": SynthSpec()}


def prepare(work: Path, experts: int, models: set[str]) -> None:
    """Checkpoints, and with the tiny one its expected tokens: transformers' own, in float32."""
    from appliance.checkpoint.synth import synthesize

    for name, spec in specs(experts).items():
        if name not in models or (work / name).exists():
            continue
        start = time.perf_counter()
        synthesize(work / name, spec)
        size = sum(f.stat().st_size for f in (work / name).iterdir())
        say(made=name, gib=round(size / 2**30, 2), seconds=round(time.perf_counter() - start, 1))


def make_plan(checkpoint: Path, case: Case, target: Path, device: str) -> dict[str, Any]:
    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.engine.hostmem import HostMapping, HostMemoryError, Node
    from appliance.plan.planner import plan
    from appliance.plan.request import Policy
    from preflight import inspect
    from preflight.source import Live

    policy = Policy(
        device="cuda" if device == "cuda" else "cpu",
        tensor_parallel=case.ranks,
        expert_parallel=case.expert_parallel,
        host_share=case.share,
        cache_slots=case.slots,
        streams=4,
        conversations=4,
        context_tokens=2048 if device == "cuda" else 512,
    )
    made = plan(inspect(Live()), read_checkpoint(checkpoint), None, policy)
    nodes = [rank.numa_node for rank in made.ranks]
    facts: dict[str, Any] = {"numa_nodes": nodes}
    try:
        for node in {n for n in nodes if n is not None}:
            HostMapping(4096, node=Node(node)).close()
    except HostMemoryError as error:
        unbound = tuple(rank.model_copy(update={"numa_node": None}) for rank in made.ranks)
        made = made.model_copy(update={"ranks": unbound})
        facts = {"numa_nodes": None, "not_bound": str(error)}
    made.write(target)
    facts["predicted_ms"] = {
        p.streams: round(1e3 / p.tokens_per_second.likely, 3)
        for p in made.predictions
        if p.streams in (1, 4) and p.tokens_per_second is not None
    }
    return facts


def prompts(count: int, tokens: int) -> list[dict[str, Any]]:
    rows = [[4 + (7 * p + 13 * i * (p + 1)) % 900 for i in range(tokens)] for p in range(count)]
    return [{"prompt_token_ids": row} for row in rows]


class Engine:
    """One vLLM: one rank in a process of its own, or several."""

    def __init__(self, a: Any, name: str) -> None:
        from vllm import LLM

        self.case = case = CASES[name]
        plan_file = a.work / f"{name}.plan.json"
        self.plan = make_plan(a.work / case.model, case, plan_file, a.device)
        gpu = a.device == "cuda"
        half = a.dtype if case.model == "large" else "float16"
        graphs = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": CAPTURE,
        }
        plain = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
        start = time.perf_counter()
        self.llm = LLM(
            str(a.work / case.model),
            dtype=half if gpu else "float32",
            enforce_eager=case.eager or not gpu,
            **(plain if not gpu else {} if case.eager else {"compilation_config": graphs}),
            tensor_parallel_size=case.ranks,
            enable_expert_parallel=case.expert_parallel,
            disable_custom_all_reduce=True,  # NCCL alone: what has been tried in this machine
            kv_cache_memory_bytes=1 << 30 if gpu else 1 << 28,
            gpu_memory_utilization=0.05,
            max_model_len=2048,
            max_num_seqs=CAPTURE[-1],
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            disable_log_stats=True,
            worker_cls="traffic_worker.CacheWorker",
            additional_config={
                "appliance": {"plan": str(plan_file), "checkpoint": str(a.work / case.model)}
            },
        )
        self.load_s = round(time.perf_counter() - start, 1)

    def generate(self, asked: list[dict[str, Any]], tokens: int) -> tuple[list[list[int]], float]:
        """Greedy tokens, and seconds."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(asked, how, use_tqdm=False)
        seconds = time.perf_counter() - start
        return [list(o.outputs[0].token_ids) for o in outputs], seconds

    def states(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.llm.collective_rpc("appliance_state")
        return found

    def prove(self) -> dict[str, Any]:
        proofs = self.llm.collective_rpc("appliance_prove")
        return {
            "ok": all(p["ok"] for p in proofs),
            "samples": [p["samples"] for p in proofs],
            "problems": [problem for p in proofs for problem in p["problems"]][:4],
        }

    def texts(self, slots: str, rules: dict[str, float]) -> dict[str, Any]:
        """Both texts under these rules of the slots, and how many were refilled meanwhile."""
        if self.case.slots:
            self.llm.collective_rpc("cache_rules", args=(rules,))
        self.llm.collective_rpc("appliance_reset")
        found: dict[str, Any] = {"slots": slots}
        for what, (before, after) in TEXTS.items():
            start = [state["promotions"] for state in self.states()]
            self.llm.collective_rpc("cache_rows")
            found[what] = self.generate(prompts(4, before), after)[0]
            found[f"{what}_rows"] = self.llm.collective_rpc("cache_rows")[0]
            end = [state["promotions"] for state in self.states()]
            found[f"{what}_promotions"] = [b - a for a, b in zip(start, end, strict=True)]
        states = self.states()
        found["picks"] = [s["picks"] for s in states]
        found["picks_not_here"] = [s["picks_not_here"] for s in states]
        if self.case.slots:
            held = self.llm.collective_rpc("cache_held")
            found["ranks_hold_the_same"] = all(h == held[0] for h in held)
        return found

    def decode(self, streams: int) -> dict[str, Any]:
        """Milliseconds and host bytes of a step: 96 tokens less 32, so prefill cancels.

        The median of four such differences, and all of them: one of another process's end is seen.
        """
        asked = prompts(streams, 24)
        self.generate(asked, 96)
        differences = []
        for _ in range(4):
            short, long = (self.generate(asked, tokens)[1] for tokens in (32, 96))
            differences.append((long - short) / 64 * 1e3)
        bytes_of = []
        for tokens in (32, 96):
            self.llm.collective_rpc("appliance_reset")
            self.generate(asked, tokens)
            bytes_of.append([state["host_bytes_read"] for state in self.states()])
        read = [(long - short) // 64 for short, long in zip(*bytes_of, strict=True)]
        step_ms, predicted = statistics.median(differences), self.plan["predicted_ms"].get(streams)
        return {
            "streams": streams,
            "step_ms": round(step_ms, 4),
            "predicted_over_measured": predicted and round(predicted / step_ms, 3),
            "all_ms": [round(ms, 3) for ms in differences],
            "host_bytes_a_step": read,
            "link_alone_ms": round(max(read) / LINK * 1e3, 4),
        }

    def prefill(self, streams: int, length: int) -> dict[str, Any]:
        asked = prompts(streams, length)
        self.generate(asked, 1)
        seconds = min(self.generate(asked, 1)[1] for _ in range(3))
        return {"prefill_tokens": streams * length, "prefill_ms": round(seconds * 1e3, 2)}


def known_answers(engine: Engine, folder: Path) -> dict[str, Any]:
    """The tiny model's tokens as transformers' own class gives them in float32, on the CPU."""
    from appliance.engine.expectations import write_expectations
    from appliance.serve.answers import read_expectations

    with (folder.parent / "answers").open("w") as one_writes:
        fcntl.flock(one_writes, fcntl.LOCK_EX)
        if read_expectations(folder) is None:
            write_expectations(folder)
    right, total, missed = 0, 0, []
    for case in read_expectations(folder) or ():
        got, _ = engine.generate([{"prompt_token_ids": list(case.prompt)}], len(case.tokens))
        pairs = list(zip(got[0], case.tokens, strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        right, total = right + first, total + len(pairs)
        if first < len(pairs):
            missed.append(case.leads[first])
    return {"known_right": right, "known": total, "leads_where_missed": missed}


def child(a: Any, name: str) -> None:
    case, began = CASES[name], time.perf_counter()
    engine = Engine(a, name)
    facts: dict[str, Any] = {"case": name, "share": case.share, "eager": case.eager}
    facts |= {"ranks": case.ranks, "expert_parallel": case.expert_parallel, **engine.plan}
    facts["load_s"] = engine.load_s
    # Tokens do not depend on who runs beside; times do.
    turn = None if a.tokens else my_turn(a.work, name, a.beside)
    facts["homes"] = [state["homes"] for state in engine.states()]
    facts["host_pages"] = [state["host_pages"] for state in engine.states()]
    facts["proof"], facts["runs"] = engine.prove(), []
    if a.tokens:
        # Twice, so that what differs by itself is not taken for what slots change.
        facts["runs"] = [engine.texts("still" if case.slots else "none", STILL) for _ in range(2)]
        if case.slots:
            facts["runs"].append(engine.texts("moving", RESTLESS))
            facts["proof_after"] = engine.prove()
            facts["runs"].append(engine.texts("still again", STILL))
        if case.model == "tiny":
            if case.slots:
                engine.llm.collective_rpc("cache_rules", args=(RESTLESS,))
            facts |= known_answers(engine, a.work / case.model)
    if a.steps and a.tokens:
        turn = my_turn(a.work, name, a.beside)
    if case.model != "tiny" and (a.steps or not a.tokens):
        facts["decode"] = [engine.decode(streams) for streams in (1, 4)]
    if not a.tokens:
        facts["prefill"] = engine.prefill(4, 2000)
    facts["seconds"] = round(time.perf_counter() - began, 1)
    hidden = {*TEXTS, *(f"{what}_rows" for what in TEXTS)}
    runs = [{k: v for k, v in run.items() if k not in hidden} for run in facts["runs"]]
    say(**facts | {"runs": runs})
    (a.work / f"{name}.part").write_text(json.dumps(facts))
    (a.work / f"{name}.part").rename(a.work / f"{name}.json")
    del turn
    leave()


def parting(one: list[list[int]], other: list[list[int]]) -> dict[str, Any]:
    """Where texts part: equal tokens before the first other one. What follows says nothing more."""
    firsts = [
        next((k for k, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        for a, b in zip(one, other, strict=True)
    ]
    return {"equal": sum(firsts), "of": sum(map(len, one)), "first_other": firsts}


def verdict(found: dict[str, Any], asked: list[str]) -> bool:
    """Runs on the same ranks agree to the token. Others add up in another order: where they part
    is said, and no verdict. So are the steps: of how many rows each was."""
    same = True
    for what in TEXTS:
        for group in sorted({CASES[c].group for c in found}):
            cases = [c for c in found if CASES[c].group == group]
            runs = [(c, run) for c in cases for run in found[c]["runs"]]
            if not runs:
                continue
            base = runs[0][1]
            other = {f"{c} {run['slots']}": parting(base[what], run[what])
                     for c, run in runs if run[what] != base[what]}  # fmt: skip
            alone = [c for c in found if CASES[c].group == (group[0], 1, False)]
            one_card = found[alone[0]]["runs"][0][what] if alone and group[1] > 1 else None
            rows = {json.dumps(run[f"{what}_rows"]) for _, run in runs}
            say(compared=what, model=group[0], ranks=group[1], expert_parallel=group[2],
                cases=cases, runs=len(runs), texts=len({json.dumps(r[what]) for _, r in runs}),
                other=other, steps_composed=len(rows), first_steps=base[f"{what}_rows"][:6],
                with_one_card=parting(one_card, base[what]) if one_card else None)  # fmt: skip
            same = same and not other
    runs = [(CASES[c], run) for c in found for run in found[c]["runs"]]
    moved = all(
        all(n > 0 for n in run[f"{what}_promotions"]) == (run["slots"] == "moving")
        for _, run in runs
        for what in TEXTS
        if run["slots"] != "still again"  # the last swaps that were decided still arrive
    )
    agree = all(r["ranks_hold_the_same"] for c, r in runs if c.slots and not c.expert_parallel)
    here = not any(any(run["picks_not_here"]) for _, run in runs)
    proofs = [f[k] for f in found.values() for k in ("proof", "proof_after") if k in f]
    ok = all((same, moved, agree, here, all(p["ok"] for p in proofs), len(found) == len(asked)))
    say(verdict=ok, same_tokens=same, slots_moved_when_asked_and_only_then=moved,
        ranks_of_tp_hold_the_same=agree, proofs=len(proofs), cases=len(found),
        asked=len(asked))  # fmt: skip
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=64, help="of each of 4 layers")
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="instead of all of --ranks")
    parser.add_argument("--ranks", type=int, default=1, help="2: also cases over two GPUs")
    parser.add_argument("--expert-parallel", action="store_true", help="of those, EP instead of TP")
    parser.add_argument("--tokens", action="store_true", help="instead of times")
    parser.add_argument("--steps", action="store_true", help="after the tokens of all: steps, too")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for all cases")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try it")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="float16",
                        help="of the large model on GPUs")  # fmt: skip
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
    say(predicted={
        "tokens": "equal in all cases and runs on the same ranks: slots none, still, moving",
        "proofs": "no problem, before the first token and after promotions",
        "tokens over two cards": "EP 2 in fp16 as one card's, 256 of 256 after short prompts",
        "steps": "within 10 % of the planner's",
        "known answers of the tiny model": "all, while its slots move, too",
    })  # fmt: skip
    a.work.mkdir(parents=True, exist_ok=True)
    prepare(a.work, a.experts, {CASES[case].model for case in a.only})
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
    return 0 if verdict(found, a.only) else 1


if __name__ == "__main__":
    sys.exit(main())
