"""vLLM on one GPU with experts in VRAM, half in host memory, all in host memory; eager and graphs.

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/serve_gpu.py --work /tmp/serve

Makes a model of true expert shapes (5120 x 2304, K = 3) and a tiny one, plans each case with the
planner, and runs every case as a process of its own: they start beside each other and take turns
to measure. One JSON line a case, then one that compares greedy tokens. Exit code 1 on a
difference, a proof with problems, or a case that died. What is expected comes first.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels")]

LINK = 51e9  # bytes a second that kernels read from host memory (FACTS section 3)
CAPTURE = [1, 2, 4, 8]
CASES: dict[str, tuple[str, float, bool]] = {  # model, share of experts on the host, eager
    "resident": ("large", 0.0, False),
    "half": ("large", 0.5, False),
    "host": ("large", 1.0, False),
    "half-eager": ("large", 0.5, True),
    "tiny": ("tiny", 0.5, False),
}


def specs(experts: int) -> dict[str, Any]:
    from appliance.checkpoint.synth import SynthSpec

    large = SynthSpec(
        layers=4, dense_layers=0, hidden_size=5120, intermediate_size=2304, experts=experts,
        top_k=6, heads=32, kv_heads=8,
    )  # fmt: skip
    return {"large": large, "tiny": SynthSpec()}


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def prepare(work: Path, experts: int, models: set[str]) -> None:
    """Checkpoints, the tiny one's expected tokens, and metadata by which vLLM finds the plugin."""
    from appliance.checkpoint.synth import synthesize

    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    info = work / "plugin" / "moe_appliance-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-appliance\nVersion: 0.1.0\n")
    groups = project["entry-points"]
    lines = [f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for g, e in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for name, spec in specs(experts).items():
        if name not in models or (work / name).exists():
            continue
        start = time.perf_counter()
        synthesize(work / name, spec)
        size = sum(f.stat().st_size for f in (work / name).iterdir())
        say(made=name, gib=round(size / 2**30, 2), seconds=round(time.perf_counter() - start, 1))


def make_plan(checkpoint: Path, share: float, target: Path, device: str) -> dict[str, Any]:
    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.engine.hostmem import HostMapping, HostMemoryError, Node
    from appliance.plan.planner import plan
    from appliance.plan.request import Policy
    from preflight import inspect
    from preflight.source import Live

    policy = Policy(device=device, tensor_parallel=1, host_share=share, streams=4, conversations=4,
                    context_tokens=2048)  # fmt: skip
    made = plan(inspect(Live()), read_checkpoint(checkpoint), None, policy)
    facts: dict[str, Any] = {"numa_node": made.ranks[0].numa_node}
    if made.ranks[0].numa_node is not None:
        try:
            HostMapping(4096, node=Node(made.ranks[0].numa_node)).close()
        except HostMemoryError as error:
            unbound = made.ranks[0].model_copy(update={"numa_node": None})
            made = made.model_copy(update={"ranks": (unbound,)})
            facts = {"numa_node": None, "not_bound": str(error)}
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
    """One vLLM in this process."""

    def __init__(self, work: Path, model: str, share: float, eager: bool, device: str) -> None:
        import torch
        from vllm import LLM

        plan_file = work / f"{os.getpid()}.plan.json"
        self.plan = make_plan(work / model, share, plan_file, device)
        dtype = "float32" if device == "cpu" else "bfloat16" if model == "large" else "float16"
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
            kv_cache_memory_bytes=1 << 30,
            gpu_memory_utilization=0.15,
            max_model_len=2048,
            max_num_seqs=CAPTURE[-1],
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            worker_extension_cls="appliance.engine.worker.WorkerExtension",
            additional_config={
                "appliance": {"plan": str(plan_file), "checkpoint": str(work / model)}
            },
        )
        self.load_s = round(time.perf_counter() - start, 1)
        self.device_bytes = torch.cuda.memory_allocated() if device == "cuda" else None

    def generate(self, asked: list[dict[str, Any]], tokens: int) -> tuple[list[list[int]], float]:
        """Greedy tokens, and seconds."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.llm.generate(asked, how, use_tqdm=False)
        seconds = time.perf_counter() - start
        return [list(o.outputs[0].token_ids) for o in outputs], seconds

    def decode(self, streams: int) -> dict[str, Any]:
        """Milliseconds and host bytes of a step: 96 tokens less 32, so prefill cancels."""
        asked = prompts(streams, 24)
        self.generate(asked, 8)
        found = {}
        for tokens in (32, 96):
            self.llm.collective_rpc("appliance_reset")
            _, seconds = min((self.generate(asked, tokens) for _ in range(3)), key=lambda p: p[1])
            state = self.llm.collective_rpc("appliance_state")[0]
            found[tokens] = (seconds, state["host_bytes_read"] / 3)
        ms = (found[96][0] - found[32][0]) / 64 * 1e3
        read = (found[96][1] - found[32][1]) / 64
        return {
            "streams": streams,
            "step_ms": round(ms, 4),
            "host_bytes_a_step": int(read),
            "link_alone_ms": round(read / LINK * 1e3, 4),
        }

    def prefill(self, streams: int, length: int) -> dict[str, Any]:
        asked = prompts(streams, length)
        self.generate(asked, 1)
        seconds = min(self.generate(asked, 1)[1] for _ in range(3))
        return {"prefill_tokens": streams * length, "prefill_ms": round(seconds * 1e3, 2)}


def known_answers(engine: Engine, folder: Path) -> dict[str, Any]:
    """The tiny model's tokens as transformers' own class gives them in float32, on the CPU."""
    from appliance.engine.expectations import read_expectations, write_expectations

    wanted = read_expectations(folder) or write_expectations(folder)
    right, total, missed = 0, 0, []
    for case in wanted.cases:
        got, _ = engine.generate([{"prompt_token_ids": list(case.prompt)}], len(case.tokens))
        pairs = list(zip(got[0], case.tokens, strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        right, total = right + first, total + len(pairs)
        if first < len(pairs):
            missed.append(case.leads[first])
    return {"known_right": right, "known": total, "leads_where_missed": missed}


def wait_for_all(work: Path, mine: str, cases: list[str]) -> None:
    """Loading takes the link: nobody measures before all have loaded, or for 90 s."""
    (work / f"{mine}.loaded").touch()
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not all((work / f"{c}.loaded").exists() for c in cases):
        time.sleep(0.2)


def child(work: Path, case: str, device: str, cases: list[str]) -> None:
    model, share, eager = CASES[case]
    start = time.perf_counter()
    engine = Engine(work, model, share, eager, device)
    facts: dict[str, Any] = {"case": case, "share": share, "eager": eager, **engine.plan}
    facts |= {"load_s": engine.load_s, "device_bytes": engine.device_bytes}
    wait_for_all(work, case, cases)
    with (work / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        proof = engine.llm.collective_rpc("appliance_prove")[0]
        facts |= {"proof": proof["ok"], "problems": proof["problems"][:4], "homes": proof["homes"]}
        facts["samples"] = proof["samples"]
        engine.llm.collective_rpc("appliance_reset")
        facts["tokens"] = engine.generate(prompts(4, 24), 64)[0]
        facts["tokens_long"] = engine.generate(prompts(4, 600), 32)[0]
        state = engine.llm.collective_rpc("appliance_state")[0]
        facts |= {k: state[k] for k in ("picks", "picks_not_here", "host_pages")}
        if model == "tiny":
            facts |= known_answers(engine, work / model)
        else:
            facts["decode"] = [engine.decode(streams) for streams in (1, 4)]
            facts["prefill"] = engine.prefill(4, 2000)
    facts["seconds"] = round(time.perf_counter() - start, 1)
    say(**facts)
    sys.stdout.flush()
    os._exit(0)  # what is measured is said; vLLM's own end takes seconds


def start(work: Path, case: str, device: str, cases: list[str]) -> subprocess.Popen[str]:
    plugin = [str(work / "plugin"), str(REPO), str(REPO / "kernels")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*plugin, os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_PLUGINS": "appliance",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "4",
    }
    with (work / f"{case}.log").open("w") as log:
        command = [sys.executable, str(Path(__file__)), "--work", str(work), "--case", case]
        command += ["--device", device, "--only", *cases]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )


def collect(running: dict[str, subprocess.Popen[str]], work: Path, limit: float) -> dict[str, Any]:
    found, deadline = {}, time.monotonic() + limit
    for case, process in running.items():
        try:
            said, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        lines = [line for line in said.splitlines() if line.startswith('{"case"')]
        if not lines:
            end = ((work / f"{case}.log").read_text() + said).splitlines()[-30:]
            say(case=case, ok=False, died=process.returncode, log=end)
            continue
        found[case] = json.loads(lines[-1])
        shown = {k: v for k, v in found[case].items() if not k.startswith("tokens")}
        say(**shown)
    return found


def verdict(found: dict[str, Any], asked: list[str]) -> bool:
    large = [c for c in found if CASES[c][0] == "large"]
    same = {
        name: len({json.dumps(found[c][name]) for c in large}) <= 1
        for name in ("tokens", "tokens_long")
    }
    proofs = all(f["proof"] and not f["picks_not_here"] for f in found.values())
    first = found[large[0]]["tokens"][0][:8] if large else None
    ok = all(same.values()) and proofs and len(found) == len(asked)
    say(verdict=ok, same_tokens=same, proofs=proofs, cases=len(found), asked=len(asked), seen=first)
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=64, help="of each of 4 layers")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for all cases")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try it")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help="only make the checkpoints")
    a = parser.parse_args()
    if a.case:
        child(a.work, a.case, a.device, a.only)
    say(predicted={
        "tokens": "equal in all cases of the large model",
        "all on the host, 1 stream": "4 layers x 6 experts x 13.27 MB = 318.5 MB a step: 6.3 ms",
        "half on the host, 1 stream": "half of the bytes: 3.2 ms",
        "resident, 1 stream": "0.125 ms a layer of experts, 1 ms a step with graphs",
        "known answers of the tiny model": "all, or missed only where the lead is under 0.05",
    })  # fmt: skip
    a.work.mkdir(parents=True, exist_ok=True)
    prepare(a.work, a.experts, {CASES[case][0] for case in a.only})
    if a.make:
        return 0
    for case in a.only:
        (a.work / f"{case}.loaded").unlink(missing_ok=True)
    running = {case: start(a.work, case, a.device, a.only) for case in a.only}
    return 0 if verdict(collect(running, a.work, a.limit), a.only) else 1


if __name__ == "__main__":
    sys.exit(main())
