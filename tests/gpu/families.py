"""Model families in vLLM on one GPU: the same tokens with half of the experts on the host?

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/families.py --work /tmp/families

Qwen3-MoE, DeepSeek-V3, GLM-4.5 and Mixtral with synthetic weights; DeepSeek-V4.1 in three layers of
true shape (5120 x 2304, top-6), with 32 experts in many variants and with 384; and the same in bf16
without us, with vLLM's --cpu-offload-gb at KV blocks of 64 and 128. Each case is a process with a
time limit; each step of it one JSON line, and an error is said with its type, words and place. Last
come the comparisons. What is expected comes first. `--device cpu` tries the four without a GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels"), str(REPO / "tests" / "gpu")]

from environment import engine_environment, say, write_plugin_metadata  # noqa: E402

FOUR = ("qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral")
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
# Tokens of a prompt. Past 512 entries V4.1's indexer has to choose, and then vLLM does not say the
# same twice, whatever is on the host: what it says is not compared there.
SHORT, LONG, ALL_ENTRIES = 24, 1400, 400
NEW_TOKENS = 24
POOL_BYTES = 64 << 20


@dataclass(frozen=True)
class Case:
    """`model`: a folder under --work; `share` of its experts on the host, None: not our engine."""

    model: str
    share: float | None
    wave: int = 1
    plain: bool = False  # vLLM's torch reference of hyper-connections, and no indexer
    options: dict[str, Any] = field(default_factory=dict)


def _cases() -> dict[str, Case]:
    four = {f"{f}-{n}": Case(f, s) for f in FOUR for n, s in (("resident", 0.0), ("half", 0.5))}
    offload = {"cpu_offload_gb": 3.0}
    graphs = {"compilation_config": GRAPHS, "enforce_eager": False}
    # With less, a block of 128 is refused for want of memory before it can fail otherwise.
    block_128 = {"block_size": 128, "kv_cache_memory_bytes": 3 << 30}
    return four | {
        "glm4_moe-fp16": Case("glm4_moe", 0.5, options={"dtype": "float16"}),
        "v41-small-half": Case("v41-small", 0.5),
        "v41-small-plain": Case("v41-small", 0.5, plain=True),
        "v41-small-resident": Case("v41-small", 0.0),
        "v41-small-fp8-table": Case("v41-small-fp8", 0.5),
        "v41-small-graphs": Case("v41-small", 0.5, options=graphs),
        "v41-small-block-128": Case("v41-small", 0.5, options=block_128),
        "v41-small-fp8-dense": Case("v41-small-dense8", 0.5),
        "v41-resident": Case("v41", 0.0, wave=2),
        "v41-half": Case("v41", 0.5, wave=2),
        "stock-64": Case("v41-bf16", None),
        "offload-64": Case("v41-bf16", None, options=offload),
        "offload-128": Case("v41-bf16", None, options=offload | block_128),
    }


CASES = _cases()
# Tokens of the cases of a row must be equal.
EQUAL = [[f"{f}-resident", f"{f}-half"] for f in FOUR] + [
    ["v41-small-resident", "v41-small-half", "v41-small-fp8-table", "v41-small-graphs"],
    ["v41-resident", "v41-half"],
    ["stock-64", "offload-64"],
]  # fmt: skip
PREDICTED = {
    "four families": "serve, proof ok, tokens equal; known answers: all 64, of DeepSeek-V3 54 as "
    "transformers has in fp16; of GLM-4.5, in float32 around kernels in fp16, 54 to 64, missed "
    "by small leads; in float16 it is refused",
    "v41-*": "serves at KV block 64, proof ok; tokens equal whatever home, table and graphs; "
    "int4 rows hold the same values as the FP8 rows that vLLM reads",
    "v41-small-fp8-dense": "attention and shared expert in FP8: serves, by Marlin, wo_a in bf16",
    "v41-small-plain": "serves; tokens may part from v41-small-half: other roundings",
    "*-128": "ValueError while KV caches are bound: pages of 64 alone on sm_90, and a packed block "
    "of 128 cannot be split (map_kv_cache_to_kernel_blocks, v1/worker/utils.py). On sm_120 pages "
    "are of 128 alone, so a block of 64 has no common size: that cannot be seen here",
    "offload-64": "serves with the tokens of stock-64; parameters of the first layers are pinned",
}


def spec(model: str, small: bool) -> Any:
    from appliance.checkpoint.synth import SynthSpec

    if model in FOUR:
        shape = {"hidden_size": 256, "intermediate_size": 256, "experts": 16} if small else {
            "hidden_size": 1024, "intermediate_size": 512, "experts": 32,
            "heads": 16, "kv_heads": 4}  # fmt: skip
        return SynthSpec(family=model, dense_layers=int(model != "mixtral"), **shape)
    shape = {"hidden_size": 256, "intermediate_size": 256} if small else {
        "hidden_size": 5120, "intermediate_size": 2304, "heads": 64}  # fmt: skip
    return SynthSpec(
        family="deepseek_v41",
        layers=3,
        dense_layers=0,
        top_k=6,
        shards=8,
        experts=384 if model == "v41" else 32,
        table_format="fp8" if model == "v41-small-fp8" else "int4",
        dense_format="fp8" if model == "v41-small-dense8" else "bf16",
        **shape,
    )


def make(work: Path, model: str, small: bool) -> None:
    """The checkpoint `work`/`model`. Trellises are pieces of one random pool: 15 GB in seconds."""
    from appliance.checkpoint.synth import v41_thin
    from appliance.checkpoint.synth.make import FAMILIES, quantization
    from appliance.checkpoint.synth.tokenizer import train, write
    from appliance.checkpoint.synth.write import new_folder, write_json, write_shards

    start, asked, folder = time.perf_counter(), spec(model, small), work / model
    if folder.exists():
        return
    family, (text, quiet) = FAMILIES[asked.family], train(asked.vocab_size)
    pool = random.Random(0).randbytes(POOL_BYTES)

    def pooled(size: int) -> Callable[[random.Random], bytes]:
        def draw(seeded: random.Random) -> bytes:
            first = seeded.randrange(POOL_BYTES - size)
            return pool[first : first + size]

        return draw

    with new_folder(folder) as out:
        write(out, text, v41_thin.blocks.CONTEXT)
        if model == "v41-bf16":
            write_json(out / "config.json", family.config(asked))
        else:
            parts = [
                replace(p, draw=pooled(p.size_bytes)) if p.name.endswith(".trellis") else p
                for p in family.parts(asked, quiet)
            ]
            config = family.config(asked) | {"quantization_config": quantization(asked, parts)}
            write_json(out / "config.json", config)
            write_shards(out, parts, shards=asked.shards)
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(made=model, gib=round(size / 2**30, 2), seconds=round(time.perf_counter() - start, 1))


def make_beside(a: Any, models: Iterable[str]) -> list[subprocess.Popen[bytes]]:
    """Checkpoints, each made by a process of its own."""
    command = [sys.executable, *sys.argv, "--model"]
    return [subprocess.Popen([*command, model]) for model in sorted(models)]


def failure(error: BaseException) -> dict[str, Any]:
    """Type, words and place of an error, and of what it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{'/'.join(f.filename.split('/')[-4:])}:{f.lineno} {f.name}" for f in frames]
    found: dict[str, Any] = {
        "error": type(error).__name__,
        "words": str(error)[:2000],
        "at": places[-1:],
        "way": places[-10:-1],
    }
    if error.__cause__ is not None:
        found["from"] = failure(error.__cause__)
    return found


def plain_hyper_connections() -> None:
    """vLLM's torch reference in place of its tilelang kernels, and no schedule for the indexer.

    What is left needs neither tilelang nor DeepGEMM, and serves contexts too short to choose from.
    """
    import importlib
    import types

    import torch

    if find_spec("tilelang") is None:

        class Nothing:
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return Nothing()

            def __call__(self, *_: Any, **__: Any) -> Any:
                return Nothing()

            __getitem__ = __call__

        stub: Any = types.ModuleType("vllm.tilelang_utils")
        stub.T = stub.tilelang = Nothing()
        stub.tilelang_jit = lambda function: function
        sys.modules["vllm.tilelang_utils"] = stub
    # By name: the package's `torch` is torch.
    plain = importlib.import_module("vllm.model_executor.kernels.mhc.torch")
    from vllm.model_executor.layers import sparse_attn_indexer
    from vllm.models.deepseek_v41.nvidia import model
    from vllm.v1.attention.backends.mla import indexer

    def pre(*args: Any, norm_weight: Any = None, norm_eps: float = 1e-6, **rest: Any) -> Any:
        post, mix, x, following = plain.mhc_pre_delayed_torch(*args, **rest)
        if norm_weight is not None:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
            x = (wide * norm_weight.float()).to(x.dtype)
        return post, mix, x, following

    def post_pre(x: Any, residual: Any, post: Any, mix: Any, *args: Any, **rest: Any) -> Any:
        for other in ("capture_aux", "stream", "reduce_results"):
            rest.pop(other, None)
        residual = plain.mhc_post_torch(x, residual, post, mix)
        return residual, *pre(residual, *args, **rest), None

    model.mhc_pre_delayed_tilelang = pre
    model.mhc_post_tilelang = plain.mhc_post_torch
    model.mhc_shifted_post_pre = post_pre
    sparse_attn_indexer.has_deep_gemm = lambda: True
    indexer.get_paged_mqa_logits_metadata = lambda lens, _block, sms, **_: torch.zeros(
        sms + 1, 2, dtype=torch.int32, device=lens.device
    )


def options(a: Any, name: str) -> dict[str, Any]:
    """What vLLM is started with."""
    from served import Case as Placement
    from served import make_plan

    case, folder, cpu = CASES[name], a.work / CASES[name].model, a.device == "cpu"
    chosen: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32" if cpu or case.model == "glm4_moe" else
        "float16" if case.model in FOUR else "bfloat16",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 29,
        "gpu_memory_utilization": 0.04,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
    }  # fmt: skip
    if cpu:
        chosen["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    if case.model not in FOUR:
        chosen |= {"block_size": 64, "limit_mm_per_prompt": {"image": 0},
                   "kernel_config": {"enable_jit_warmup": False}}  # fmt: skip
    if case.share is None:
        return chosen | {"load_format": "dummy"} | case.options
    plan_file = a.work / f"{name}.plan.json"
    make_plan(folder, Placement(case.model, case.share), plan_file, a.device)
    ours = {"plan": str(plan_file), "checkpoint": str(folder)}
    chosen |= {"worker_cls": "appliance.engine.worker.Worker",
               "additional_config": {"appliance": ours}}  # fmt: skip
    return chosen | case.options


def prompts(count: int, tokens: int) -> list[dict[str, Any]]:
    rows = [[5 + (7 * p + 13 * i * (p + 1)) % 900 for i in range(tokens)] for p in range(count)]
    return [{"prompt_token_ids": row} for row in rows]


class Served:
    """One case: its engine and its steps, each said as it ends."""

    def __init__(self, a: Any, name: str) -> None:
        from vllm import LLM

        if CASES[name].plain:
            plain_hyper_connections()
        self.folder, self.ours = a.work / CASES[name].model, CASES[name].share is not None
        self.repeats = CASES[name].model in FOUR  # also on a long prompt
        self.llm = LLM(**options(a, name))

    def proof(self) -> dict[str, Any]:
        if not self.ours:
            return {"ours": False}
        (found,) = self.llm.collective_rpc("appliance_prove")
        self.llm.collective_rpc("appliance_reset")
        return {k: found[k] for k in ("ok", "problems", "homes", "samples")}

    def generate(self, asked: list[dict[str, Any]], tokens: int) -> list[list[int]]:
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate(asked, how, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    def short(self) -> dict[str, Any]:
        return {"tokens": self.generate(prompts(4, SHORT), NEW_TOKENS)}

    def again(self) -> dict[str, Any]:
        return {"tokens": self.generate(prompts(4, SHORT), NEW_TOKENS)}

    def long(self) -> dict[str, Any]:
        return {"tokens": self.generate(prompts(2, LONG if self.repeats else ALL_ENTRIES), 8)}

    def choosing(self) -> dict[str, Any]:
        return {"tokens": self.generate(prompts(2, LONG), 8)}

    def state(self) -> dict[str, Any]:
        if not self.ours:
            return {"ours": False}
        (found,) = self.llm.collective_rpc("appliance_state")
        return {k: found[k] for k in ("picks", "host_bytes_read", "picks_not_here", "host_pages")}

    def answers(self) -> dict[str, Any]:
        """What transformers' own class says in float32 on the CPU, where it knows the family."""
        from appliance.engine.expectations import write_expectations

        right = total = 0
        leads = []  # of the right token over the next best, in logits, where the first is missed
        for case in write_expectations(self.folder).cases:
            (got,) = self.generate([{"prompt_token_ids": list(case.prompt)}], len(case.tokens))
            pairs = list(zip(got, case.tokens, strict=True))
            first = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
            right, total = right + first, total + len(pairs)
            leads += case.leads[first : first + 1]
        return {"right": right, "of": total, "leads_where_missed": leads}


def child(a: Any, name: str) -> None:
    faulthandler.dump_traceback_later(max(5.0, a.limit - 5.0), file=sys.stderr)
    found: dict[str, Any] = {}

    def step(what: str, run: Callable[[], Any]) -> bool:
        start = time.perf_counter()
        try:
            facts = run()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # said, whatever it is
            facts = failure(error)
            traceback.print_exc()
        seconds = round(time.perf_counter() - start, 2)
        found[what] = facts
        said = {k: v for k, v in facts.items() if k != "tokens"}
        if "tokens" in facts:
            said["first"] = facts["tokens"][0][:8]
        say(case=name, step=what, seconds=seconds, **said)
        return "error" not in facts

    served: list[Served] = []

    def load() -> dict[str, Any]:
        import torch

        served.append(Served(a, name))
        held = torch.cuda.memory_allocated() if a.device == "cuda" else 0
        return {"device_gib": round(held / 2**30, 3)}

    if step("load", load):
        (one,) = served
        going = step("proof", one.proof) and step("short", one.short)
        going = going and step("again", one.again) and step("state", one.state)
        if going and name.endswith("-resident") and CASES[name].model in FOUR:
            step("answers", one.answers)
        if going and not CASES[name].plain:
            step("long", one.long) and (one.repeats or step("choosing", one.choosing))
    (a.work / f"{name}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # what is measured is kept; vLLM's own end takes seconds


def run_wave(a: Any, names: Iterable[str]) -> None:
    """All at once, each in a process of its own; what still runs at the limit is ended."""
    environment = {
        **engine_environment(a.work / "plugin"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",  # kernels that are needed are compiled all the same
    }
    running: dict[str, subprocess.Popen[bytes]] = {}
    for name in names:
        (a.work / f"{name}.json").unlink(missing_ok=True)
        own = {"VLLM_USE_DEEP_GEMM": "0"} if CASES[name].plain else {}
        with (a.work / f"{name}.log").open("w") as log:
            running[name] = subprocess.Popen(
                [sys.executable, *sys.argv, "--case", name],
                env={**environment, **own},
                stderr=log,
                start_new_session=True,
            )
    deadline = time.monotonic() + a.limit
    for name, process in running.items():
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not (a.work / f"{name}.json").exists():
            log_end = (a.work / f"{name}.log").read_text(errors="replace").splitlines()[-25:]
            say(case=name, died=process.returncode, log=log_end)


def verdict(a: Any) -> bool:
    found = {}
    for name in a.only:
        file = a.work / f"{name}.json"
        found[name] = json.loads(file.read_text()) if file.exists() else {}
    served = {n for n, f in found.items() if "tokens" in f.get("short", {})}
    equal = []
    for row in EQUAL:
        here = [name for name in row if name in served]
        for what in ("short", "long"):
            texts = {
                n: found[n][what]["tokens"] for n in here if "tokens" in found[n].get(what, {})
            }
            if len(texts) > 1:
                first, *others = texts
                same = {n: texts[n] == texts[first] for n in others}
                equal.append(all(same.values()))
                say(compared=what, with_=first, equal=same)
    proved = {n: found[n]["proof"]["ok"] for n in served if "ok" in found[n]["proof"]}
    refused = {"glm4_moe-fp16", "v41-small-block-128"}
    ours = {n for n in a.only if CASES[n].share is not None} - refused
    ok = all(equal) and all(proved.values()) and served >= ours
    say(verdict=ok, served=sorted(served), not_served=sorted(set(a.only) - served), proved=proved)
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for a wave of cases")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--make", action="store_true", help="only make the checkpoints")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    if a.model:
        make(a.work, a.model, a.small)
        return 0
    if a.case:
        child(a, a.case)
    write_plugin_metadata(a.work / "plugin")
    say(predicted=PREDICTED)
    waves = [[name for name in a.only if CASES[name].wave == wave] for wave in (1, 2)]
    now, later = ({CASES[name].model for name in names} for names in waves)
    making = make_beside(a, now)
    if a.make:
        return max(p.wait() for p in making + make_beside(a, later - now))
    for process in making:
        process.wait()
    making = make_beside(a, later - now)  # 15 GB are written while the first wave runs
    for names in waves:
        run_wave(a, names)
        for process in making:
            process.wait()
    return 0 if verdict(a) else 1


if __name__ == "__main__":
    sys.exit(main())
