"""vLLM on one GPU or two, experts in VRAM, half or all of them in host memory; eager and graphs.

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/serve_gpu.py --work /tmp/serve

Makes a model of true expert shapes (5120 x 2304, K = 3) and a tiny one, plans each case with the
planner, and runs every case as a process of its own: they start beside each other and take turns
to measure. One JSON line a case, then one that compares greedy tokens. Exit code 1 on a
difference, a proof with problems, or a case that died. What is expected comes first.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels"), str(REPO / "tests" / "gpu")]

from environment import engine_environment, say, write_plugin_metadata  # noqa: E402

LINK = 51e9  # bytes a second that kernels read from host memory (FACTS section 3)
CAPTURE = [1, 2, 4, 8]
CLEAR_LEAD = 0.25  # logits: a token of 16-bit sums may differ over ranks where it leads by less


@dataclass(frozen=True)
class Case:
    model: str
    share: float  # of the experts on the host
    eager: bool = False
    ranks: int = 1
    expert_parallel: bool = False


CASES = {
    "resident": Case("large", 0.0),
    "half": Case("large", 0.5),
    "host": Case("large", 1.0),
    "half-eager": Case("large", 0.5, eager=True),
    "tiny": Case("tiny", 0.5),
    "resident-tp2": Case("large", 0.0, ranks=2),
    "half-tp2": Case("large", 0.5, ranks=2),
    "half-ep2": Case("large", 0.5, ranks=2, expert_parallel=True),
    "host-tp2": Case("large", 1.0, ranks=2),
    "tiny-tp2": Case("tiny", 0.5, ranks=2),
    "tiny-ep2": Case("tiny", 0.5, ranks=2, expert_parallel=True),
}


def specs(experts: int) -> dict[str, Any]:
    from appliance.checkpoint.synth import SynthSpec

    large = SynthSpec(
        layers=4, dense_layers=0, hidden_size=5120, intermediate_size=2304, experts=experts,
        top_k=6, heads=32, kv_heads=8,
    )  # fmt: skip
    return {"large": large, "tiny": SynthSpec()}


def prepare(work: Path, experts: int, models: set[str]) -> None:
    """Checkpoints, the tiny one's expected tokens, and metadata by which vLLM finds the plugin."""
    from appliance.checkpoint.synth import synthesize

    write_plugin_metadata(work / "plugin")
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
        streams=4,
        conversations=4,
        context_tokens=2048,
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
    facts["predicted_step"] = [
        p.model_dump(include={"streams", "link_ms_per_step", "compute_ms", "waiting_ms"})
        for p in made.predictions
        if p.streams in (1, 4)
    ]
    return facts


def prompts(count: int, tokens: int) -> list[dict[str, Any]]:
    rows = [[4 + (7 * p + 13 * i * (p + 1)) % 900 for i in range(tokens)] for p in range(count)]
    return [{"prompt_token_ids": row} for row in rows]


class Engine:
    """One vLLM: one rank in this process, several in processes of their own."""

    def __init__(self, work: Path, case: Case, device: str, large_dtype: str) -> None:
        import torch
        from vllm import LLM

        model, eager = case.model, case.eager
        plan_file = work / f"{os.getpid()}.plan.json"
        self.plan = make_plan(work / model, case, plan_file, device)
        dtype = "float32" if device == "cpu" else large_dtype if model == "large" else "float16"
        graphs = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": CAPTURE,
        }
        start = time.perf_counter()
        self.llm = LLM(
            str(work / model),
            dtype=dtype,
            enforce_eager=eager or device == "cpu",
            **({} if eager or device == "cpu" else {"compilation_config": graphs}),
            tensor_parallel_size=case.ranks,
            enable_expert_parallel=case.expert_parallel,
            disable_custom_all_reduce=True,  # NCCL alone: what has been tried in this machine
            kv_cache_memory_bytes=1 << 30,
            gpu_memory_utilization=0.15,
            max_model_len=2048,
            max_num_seqs=CAPTURE[-1],
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            worker_cls="appliance.engine.worker.Worker",
            additional_config={
                "appliance": {"plan": str(plan_file), "checkpoint": str(work / model)}
            },
        )
        self.load_s = round(time.perf_counter() - start, 1)
        alone = device == "cuda" and case.ranks == 1
        self.device_bytes = torch.cuda.memory_allocated() if alone else None

    def generate(self, asked: list[dict[str, Any]], tokens: int) -> tuple[list[list[int]], float]:
        """Greedy tokens, and seconds."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(asked, how, use_tqdm=False)
        seconds = time.perf_counter() - start
        return [list(o.outputs[0].token_ids) for o in outputs], seconds

    def leads(self, asked: list[dict[str, Any]], tokens: int) -> list[list[float]]:
        """How far each greedy token is ahead of the next best, in logits."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
        found = []
        for output in self.llm.generate(asked, how, use_tqdm=False):
            steps = output.outputs[0].logprobs or []
            best = [sorted((p.logprob for p in step.values()), reverse=True) for step in steps]
            found.append([round(b[0] - b[1], 4) for b in best])
        return found

    def read(self) -> list[int]:
        """Bytes that each rank read from the host since the last reset."""
        states = self.llm.collective_rpc("appliance_state")
        return [state["host_bytes_read"] for state in states]

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
            bytes_of.append(self.read())
        read = [(long - short) // 64 for short, long in zip(*bytes_of, strict=True)]
        return {
            "streams": streams,
            "step_ms": round(statistics.median(differences), 4),
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

    with (folder.parent / "answers").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
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


def wait_for_all(work: Path, mine: str, cases: list[str]) -> None:
    """Loading takes the link: nobody measures before all have loaded or died, or for 150 s."""
    (work / f"{mine}.loaded").touch()
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and not all((work / f"{c}.loaded").exists() for c in cases):
        time.sleep(0.2)


def child(work: Path, name: str, device: str, cases: list[str], large_dtype: str) -> None:
    case, began = CASES[name], time.perf_counter()
    engine = Engine(work, case, device, large_dtype)
    facts: dict[str, Any] = {"case": name, "share": case.share, "eager": case.eager}
    facts |= {"ranks": case.ranks, "expert_parallel": case.expert_parallel, **engine.plan}
    facts |= {"load_s": engine.load_s, "device_bytes": engine.device_bytes}
    wait_for_all(work, name, cases)
    # Held until this process has ended: the release of pinned memory holds up others' launches.
    turn = (work / "turn").open("w")
    fcntl.flock(turn, fcntl.LOCK_EX)
    proofs = engine.llm.collective_rpc("appliance_prove")
    facts |= {"proof": all(p["ok"] for p in proofs), "homes": [p["homes"] for p in proofs]}
    facts["problems"] = [problem for p in proofs for problem in p["problems"]][:4]
    facts["samples"] = [p["samples"] for p in proofs]
    engine.llm.collective_rpc("appliance_reset")
    facts["tokens"] = engine.generate(prompts(4, 24), 64)[0]
    facts["tokens_long"] = engine.generate(prompts(4, 600), 32)[0]
    states = engine.llm.collective_rpc("appliance_state")
    facts |= {k: [s[k] for s in states] for k in ("picks", "picks_not_here", "host_pages")}
    facts["tokens_leads"] = engine.leads(prompts(4, 24), 64)
    facts["tokens_long_leads"] = engine.leads(prompts(4, 600), 32)
    if case.model == "tiny":
        facts |= known_answers(engine, work / case.model)
    else:
        facts["decode"] = [engine.decode(streams) for streams in (1, 4)]
        facts["prefill"] = engine.prefill(4, 2000)
    facts["seconds"] = round(time.perf_counter() - began, 1)
    (work / f"{name}.part").write_text(json.dumps(facts))
    (work / f"{name}.part").rename(work / f"{name}.json")
    os._exit(0)  # what is measured is kept; vLLM's own end takes seconds


def start(
    work: Path, case: str, device: str, cases: list[str], large_dtype: str
) -> subprocess.Popen[str]:
    environment = {
        **engine_environment(work / "plugin"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    with (work / f"{case}.log").open("w") as log:
        command = [sys.executable, str(Path(__file__)), "--work", str(work), "--case", case]
        command += ["--device", device, "--dtype", large_dtype, "--only", *cases]
        return subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, text=True, start_new_session=True
        )


def collect(running: dict[str, subprocess.Popen[str]], work: Path, limit: float) -> dict[str, Any]:
    """What each case found, said as it ends. At the limit all that still run are ended."""
    found, left, deadline = {}, dict(running), time.monotonic() + limit
    while left:
        over = time.monotonic() > deadline
        for case, process in list(left.items()):
            if process.poll() is None and not over:
                continue
            with contextlib.suppress(ProcessLookupError):  # its ranks, too
                os.killpg(process.pid, signal.SIGKILL)
            del left[case]
            (work / f"{case}.loaded").touch()
            result = work / f"{case}.json"
            if not result.exists():
                end = (work / f"{case}.log").read_text().splitlines()[-30:]
                say(case=case, ok=False, died=process.poll(), over=over, log=end)
                continue
            found[case] = json.loads(result.read_text())
            say(**{k: v for k, v in found[case].items() if not k.startswith("tokens")})
        time.sleep(0.2)
    return found


def parting(one: dict[str, Any], other: dict[str, Any], what: str) -> dict[str, Any]:
    """Where two runs' greedy tokens part: equal tokens of all, and the leads at the first others.

    After that the texts are different ones and say nothing more.
    """
    equal, leads = 0, []
    rows = zip(one[what], other[what], one[f"{what}_leads"], strict=True)
    for a, b, lead in rows:
        first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        equal += len(a) if first is None else first
        leads += [] if first is None else [lead[first]]
    return {"equal": equal, "of": sum(map(len, one[what])), "leads_where_they_part": leads}


def verdict(found: dict[str, Any], asked: list[str]) -> bool:
    """One rank: equal to the token. Two: sums are added in another order, so they may part where
    the lead is small, and nowhere else."""
    ok = len(found) == len(asked)
    for model in ("large", "tiny"):
        cases = [c for c in found if CASES[c].model == model]
        alone = [c for c in cases if CASES[c].ranks == 1]
        for what in ("tokens", "tokens_long"):
            same = len({json.dumps(found[c][what]) for c in alone}) <= 1
            parted = {
                c: parting(found[alone[0]], found[c], what)
                for c in cases
                if alone and CASES[c].ranks > 1
            }
            clear = all(
                lead < CLEAR_LEAD for p in parted.values() for lead in p["leads_where_they_part"]
            )
            ok = ok and same and clear
            say(compared=what, model=model, one_rank_equal=same, with_one_rank=parted, clear=clear)
    proofs = all(f["proof"] and not any(f["picks_not_here"]) for f in found.values())
    ok = ok and proofs
    say(verdict=ok, proofs=proofs, cases=len(found), asked=len(asked))
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=64, help="of each of 4 layers")
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="instead of all of --ranks")
    parser.add_argument("--ranks", type=int, default=1, help="2: also cases over two GPUs")
    parser.add_argument("--expert-parallel", action="store_true", help="of those, EP instead of TP")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for all cases")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try it")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16",
                        help="of the large model on GPUs")  # fmt: skip
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help="only make the checkpoints")
    a = parser.parse_args()
    a.only = a.only or [
        name
        for name, case in CASES.items()
        if case.ranks == 1 or (case.ranks <= a.ranks and case.expert_parallel == a.expert_parallel)
    ]
    if a.case:
        child(a.work, a.case, a.device, a.only, a.dtype)
    say(predicted={
        "tokens": "equal in all cases of the large model",
        "all on the host, 1 stream": "4 layers x 6 experts x 13.27 MB = 318.5 MB a step: 6.3 ms",
        "half on the host, 1 stream": "half of the bytes: 3.2 ms",
        "two ranks": "each link reads half of the bytes a step; TP 1.6 and 3.1 ms of link at half "
        "and all on the host; tokens part from one rank's only where they lead by under 0.25",
        "resident, 1 stream": "0.125 ms a layer of experts, 1 ms a step with graphs",
        "known answers of the tiny model": "all, or missed only where the lead is under 0.05",
    })  # fmt: skip
    a.work.mkdir(parents=True, exist_ok=True)
    prepare(a.work, a.experts, {CASES[case].model for case in a.only})
    if a.make:
        return 0
    for case in a.only:
        for kind in ("loaded", "json"):
            (a.work / f"{case}.{kind}").unlink(missing_ok=True)
    running = {case: start(a.work, case, a.device, a.only, a.dtype) for case in a.only}
    return 0 if verdict(collect(running, a.work, a.limit), a.only) else 1


if __name__ == "__main__":
    sys.exit(main())
