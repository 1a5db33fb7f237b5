"""A model in vLLM over the planner's plan of it, asked for greedy tokens and for times."""

from __future__ import annotations

import fcntl
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import say

LINK = 51e9  # bytes a second that kernels read from host memory (FACTS section 3)
CAPTURE = [1, 2, 4, 8]
TEXTS = {"tokens": (24, 64), "tokens_long": (600, 32)}  # of a prompt, and greedily after it
Tokens = list[list[int]]


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

    @property
    def texts(self) -> int:
        """More of the decided model: those of which one card is sure to the end are compared."""
        return 64 if self.model == "decided" else 4


def specs(experts: int, layers: int = 4, small: bool = False) -> dict[str, Any]:
    """The models by name; `small`: the decided one, too, for a CPU."""
    from appliance.checkpoint.synth import SynthSpec

    true: dict[str, Any] = {"layers": layers, "hidden_size": 5120, "intermediate_size": 2304,
                            "experts": experts, "top_k": 6, "heads": 32, "kv_heads": 8}  # fmt: skip
    little: dict[str, Any] = {"layers": 2, "hidden_size": 512, "experts": 32, "top_k": 2}
    return {
        "large": SynthSpec(dense_layers=0, **true),
        "decided": SynthSpec(router="decided", dense_layers=0, **(little if small else true)),
        "tiny": SynthSpec(),
    }


def prepare(work: Path, models: dict[str, Any]) -> None:
    """Checkpoints, those that are not there yet."""
    from appliance.checkpoint.synth import synthesize

    for name, spec in models.items():
        if (work / name).exists():
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


def prompts(count: int, tokens: int, first: int = 0) -> list[dict[str, Any]]:
    numbers = range(first, first + count)
    rows = [[4 + (7 * p + 13 * i * (p + 1)) % 900 for i in range(tokens)] for p in numbers]
    return [{"prompt_token_ids": row} for row in rows]


class Engine:
    """One vLLM: one rank in a process of its own, or several."""

    def __init__(self, a: Any, name: str, case: Case) -> None:
        from vllm import LLM

        self.case = case
        plan_file = a.work / f"{name}.plan.json"
        self.plan = make_plan(a.work / case.model, case, plan_file, a.device)
        gpu = a.device == "cuda"
        graphs = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted({*CAPTURE, case.texts}),
        }
        plain = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
        half = "float16" if case.model == "tiny" else a.dtype
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
            max_num_seqs=max(*CAPTURE, case.texts),
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            disable_log_stats=True,
            worker_cls="traffic_worker.CacheWorker",
            additional_config={
                "appliance": {"plan": str(plan_file), "checkpoint": str(a.work / case.model)}
            },
        )
        self.load_s = round(time.perf_counter() - start, 1)

    def ask(self, what: str, *words: Any) -> list[Any]:
        found: list[Any] = self.llm.collective_rpc(what, args=words)
        return found

    def generate(self, asked: list[dict[str, Any]], tokens: int) -> tuple[Tokens, float]:
        """Greedy tokens, and seconds."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(asked, how, use_tqdm=False)
        seconds = time.perf_counter() - start
        return [list(o.outputs[0].token_ids) for o in outputs], seconds

    def generate_with_leads(
        self, asked: list[dict[str, Any]], tokens: int
    ) -> tuple[Tokens, list[list[float]]]:
        """Greedy tokens, and how far each leads the next best, in logits."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
        outputs = [o.outputs[0] for o in self.llm.generate(asked, how, use_tqdm=False)]
        return [list(o.token_ids) for o in outputs], [
            [_lead([one.logprob for one in step.values()]) for step in o.logprobs] for o in outputs
        ]

    def states(self) -> list[dict[str, Any]]:
        return self.ask("appliance_state")

    def prove(self) -> dict[str, Any]:
        proofs = self.ask("appliance_prove")
        return {
            "ok": all(p["ok"] for p in proofs),
            "samples": [p["samples"] for p in proofs],
            "problems": [problem for p in proofs for problem in p["problems"]][:4],
        }

    def texts(self, slots: str, rules: dict[str, float]) -> dict[str, Any]:
        """Both texts under these rules of the slots, and how many were refilled meanwhile."""
        if self.case.slots:
            self.ask("cache_rules", rules)
        self.ask("appliance_reset")
        found: dict[str, Any] = {"slots": slots}
        for what, (before, after) in TEXTS.items():
            start = [state["promotions"] for state in self.states()]
            self.ask("cache_rows")
            asked = prompts(self.case.texts, before)
            found[what], found[f"{what}_leads"] = self.generate_with_leads(asked, after)
            found[f"{what}_rows"] = self.ask("cache_rows")[0]
            end = [state["promotions"] for state in self.states()]
            found[f"{what}_promotions"] = [b - a for a, b in zip(start, end, strict=True)]
        states = self.states()
        found["picks"] = [s["picks"] for s in states]
        found["picks_not_here"] = [s["picks_not_here"] for s in states]
        if self.case.slots:
            held = self.ask("cache_held")
            found["ranks_hold_the_same"] = all(h == held[0] for h in held)
        return found

    def decode(self, streams: int, repeats: int = 4) -> dict[str, Any]:
        """Milliseconds and host bytes of a step: 96 tokens less 32, so prefill cancels.

        The median of such differences, each with prompts of its own, and all of them: one of
        another process's end is seen.
        """
        self.generate(prompts(streams, 24), 96)
        steps, read = [], []
        for repeat in range(repeats):
            asked = prompts(streams, 24, first=repeat * streams)
            short, long = (self._timed(asked, tokens) for tokens in (32, 96))
            steps.append((long[0] - short[0]) / 64 * 1e3)
            read.append([(b - a) / 64 for a, b in zip(short[1], long[1], strict=True)])
        step_ms, predicted = statistics.median(steps), self.plan["predicted_ms"].get(streams)
        bytes_a_step = [round(statistics.mean(rank)) for rank in zip(*read, strict=True)]
        return {
            "streams": streams,
            "step_ms": round(step_ms, 4),
            "predicted_over_measured": predicted and round(predicted / step_ms, 3),
            "all_ms": [round(ms, 3) for ms in steps],
            "host_bytes_a_step": bytes_a_step,
            "link_alone_ms": round(max(bytes_a_step) / LINK * 1e3, 4),
        }

    def _timed(self, asked: list[dict[str, Any]], tokens: int) -> tuple[float, list[int]]:
        """Seconds, and the bytes that each rank read from the host."""
        self.ask("appliance_reset")
        seconds = self.generate(asked, tokens)[1]
        return seconds, [state["host_bytes_read"] for state in self.states()]

    def prefill(self, streams: int, length: int) -> dict[str, Any]:
        asked = prompts(streams, length)
        self.generate(asked, 1)
        seconds = min(self.generate(asked, 1)[1] for _ in range(3))
        return {"prefill_tokens": streams * length, "prefill_ms": round(seconds * 1e3, 2)}


def _lead(logprobs: Sequence[float]) -> float:
    best, second = sorted(logprobs, reverse=True)[:2]
    return best - second


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
