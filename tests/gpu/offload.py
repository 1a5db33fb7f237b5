"""vLLM's own --cpu-offload-gb beside ours: what one offloaded layer of experts costs a step.

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/offload.py --work /tmp/offload

Three layers of 320 experts (5120 x 2304, top-6). vLLM's: bf16, dummy weights, all in VRAM, and with
the experts of one layer offloaded, at KV blocks of 64 and of 128 tokens. Ours: EXL3 at 3 bits made
in memory, all in VRAM, and a third of the experts on the host: one layer whole, or a third of every
layer. 320 and not 384: torch pins powers of two, and gate and up of one layer are then 14 of 16 GiB
and not 17 of 32. A step reads six experts a row either way.

Two groups of processes, each loading together and measuring in turn. One JSON line as soon as a
figure is there; at the end what an offloaded layer costs, format and placement apart.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels"), str(REPO / "tests" / "gpu")]

from environment import leave, my_turn, run_cases, say  # noqa: E402
from made import Case, make_model, make_plan  # noqa: E402

LAYERS, EXPERTS, HIDDEN, INNER = 3, 320, 5120, 2304
LAYER_GIB = 3 * EXPERTS * HIDDEN * INNER * 2 / 2**30
# 90 GB of the first group's VRAM are vLLM's, 30 ours; 68 of the second's.
GROUPS = (
    ("vllm-offloaded-64", "vllm-offloaded-128", "ours-whole-layer", "ours-spread", "ours-resident"),
    ("vllm-resident",),
)
CASES = tuple(case for group in GROUPS for case in group)
STEPS, MOST_STEPS, SHORT = 12, 120, 4  # more where a step is quick: 10 ms
ENOUGH_SECONDS = 15.0  # of one case's measuring: then it leaves the others their turn


def spec(small: bool) -> Any:
    from appliance.checkpoint.synth import SynthSpec

    sizes = {"hidden_size": 256, "intermediate_size": 128} if small else {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "heads": 32, "kv_heads": 8}  # fmt: skip
    return SynthSpec(layers=LAYERS, dense_layers=0, experts=EXPERTS, top_k=6, **sizes)


def dense_folder(work: Path, model: Path) -> Path:
    """The same model without EXL3: configuration and tokenizer only."""
    folder = work / "dense"
    folder.mkdir(exist_ok=True)
    for file in model.glob("*.json"):
        if "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    config.pop("quantization_config")
    config["torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def options(a: Any, name: str) -> dict[str, Any]:
    model = a.work / "model"
    if name.startswith("vllm"):
        found: dict[str, Any] = {"model": str(a.work / "dense"), "load_format": "dummy"}
        found["dtype"] = "bfloat16"
        if name != "vllm-resident":
            found["cpu_offload_gb"] = round(LAYER_GIB, 2)  # vLLM's "GB" are GiB
            found["cpu_offload_params"] = {"experts"}
            found["block_size"] = int(name.rsplit("-", 1)[1])
        return found
    vram = 1.0 if name == "ours-resident" else 2 / 3
    case = Case(0, vram=vram, whole_layers=name == "ours-whole-layer")
    plan_file = a.work / f"{name}.plan.json"
    make_plan(model, case, None, a.device, 1, False).write(plan_file)
    ours = {"plan": str(plan_file), "checkpoint": str(model), "traffic": ""}
    return {
        "model": str(model),
        "load_format": "made_in_memory",
        "dtype": "float16" if a.device == "cuda" else "float32",
        "worker_cls": "traffic_worker.MadeInMemoryWorker",
        "additional_config": {"appliance": ours},
    }


def open_engine(a: Any, name: str) -> Any:
    # Pinned by writing and registering from eight threads: cudaHostAlloc takes a minute for this.
    pins = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", pins)
    from vllm import LLM

    gpu = a.device == "cuda"
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
              "cudagraph_capture_sizes": [1, 4, 6]}  # fmt: skip
    return LLM(
        **options(a, name),
        compilation_config=graphs if gpu else {"custom_ops": ["all", "-rotary_embedding"]},
        enforce_eager=not gpu,
        kv_cache_memory_bytes=1 << 28,
        gpu_memory_utilization=0.1,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=32,  # warm-up steps read the experts of so many rows over the link
        enable_prefix_caching=False,
        disable_log_stats=True,
    )


def measure(a: Any, name: str) -> None:
    from vllm import SamplingParams

    start = time.perf_counter()
    llm = open_engine(a, name)
    load_s = round(time.perf_counter() - start, 1)
    block = llm.llm_engine.vllm_config.cache_config.block_size
    say(case=name, load_s=load_s, kv_block_tokens=block)
    turn = my_turn(a.work, name, a.beside)  # noqa: F841  # held until the end
    if name.startswith("ours"):
        llm.collective_rpc("appliance_reset")
    steps: dict[str, float] = {}
    began = time.perf_counter()

    def generate(streams: int, tokens: int) -> float:
        asked = [{"prompt_token_ids": [5 + s, 6, 7]} for s in range(streams)]
        how = SamplingParams(temperature=0.8, seed=7, max_tokens=tokens, ignore_eos=True)
        at = time.perf_counter()
        llm.generate(asked, how, use_tqdm=False)
        return time.perf_counter() - at

    for streams in (1, 4, 6):
        say(case=name, streams=streams, first_two_tokens_ms=round(generate(streams, 2) * 1e3, 1))
        found: list[float] = []
        steps_of_one = STEPS
        while len(found) < 3 and time.perf_counter() - began < ENOUGH_SECONDS:
            short, long = generate(streams, SHORT), generate(streams, SHORT + steps_of_one)
            step_ms = round((long - short) / steps_of_one * 1e3, 3)
            say(case=name, streams=streams, step_ms=step_ms, of_steps=steps_of_one)
            if step_ms < 10 and steps_of_one < MOST_STEPS:
                steps_of_one = MOST_STEPS  # and this one told only that
            else:
                found.append(step_ms)
        if found:
            steps[str(streams)] = sorted(found)[len(found) // 2]
    (a.work / f"{name}.steps.json").write_text(json.dumps(steps))
    say(case=name, median_step_ms=steps)
    leave()


def factors(work: Path) -> None:
    """Milliseconds of one offloaded layer, and what of that is the format and what the place."""
    found = {}
    for case in CASES:
        file = work / f"{case}.steps.json"
        found[case] = json.loads(file.read_text()) if file.exists() else {}
    for streams in ("1", "4", "6"):
        at = {case: steps.get(streams) for case, steps in found.items()}

        def over(case: str, base: str, at: Any = at) -> float | None:
            """None also where nothing is left: both steps are the engine's own time."""
            both = at[case] is not None and at[base] is not None
            return round(at[case] - at[base], 3) if both and at[case] > at[base] else None

        layer = {c: over(c, "vllm-resident") for c in GROUPS[0] if c.startswith("vllm")}
        layer |= {c: over(c, "ours-resident") for c in ("ours-whole-layer", "ours-spread")}
        theirs, ours = layer["vllm-offloaded-64"], layer["ours-whole-layer"]
        spread = layer["ours-spread"]
        say(streams=int(streams), ms_of_one_layers_experts_on_the_host=layer,
            format_factor=round(theirs / ours, 2) if theirs and ours else None,
            placement_factor=round(ours / spread, 2) if ours and spread else None)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for a group of cases")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--beside", nargs="+", default=[], help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.case:
        measure(a, a.case)
    say(predicted={
        "one offloaded layer, bf16, 1, 4 and 6 streams": "6, 23 and 34 experts of 70.8 MB: 8.3, 32 "
        "and 48 ms at 51 GB/s, if a kernel of Triton reads at that rate; 2 to 3 times it if not",
        "ours, one of three layers on the host": "of 13.3 MB: 1.6, 6.1 and 9.0 ms",
        "ours, a third of every layer": "the same bytes, within 10 % of it; the placement factor "
        "comes from traffic that has favourites (traffic.py), not from independent rows",
        "format factor": "5.3, the bytes",
    })  # fmt: skip
    a.work.mkdir(parents=True, exist_ok=True)
    make_model(a.work / "model", spec(a.small))
    dense_folder(a.work, a.work / "model")
    codes = []
    for group in GROUPS:
        cases = [case for case in group if case in a.only]
        for case in cases:
            (a.work / f"{case}.steps.json").unlink(missing_ok=True)
        codes.append(run_cases(cases, a.work, a.limit, together=True) if cases else 0)
    factors(a.work)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
