"""vLLM's own --cpu-offload-gb beside ours: what one offloaded layer of experts costs a step.

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/offload.py --work /tmp/offload

Three layers of 384 experts (5120 x 2304, top-6). vLLM's: bf16, everything in VRAM, and with the
budget of one layer's experts (27.2 GB) offloaded, which it moves as whole parameters. Ours: EXL3 at
3 bits made in memory, everything in VRAM, and a third of the experts on the host: one layer whole,
or a third of every layer. Random weights, independent rows. One JSON line a case.
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

from environment import run_cases, say  # noqa: E402
from traffic import Case, make_model, make_plan  # noqa: E402

LAYERS, EXPERTS, HIDDEN, INNER = 3, 384, 5120, 2304
ONE_LAYER_GB = 3 * EXPERTS * HIDDEN * INNER * 2 / 2**30  # vLLM's "GB" are GiB
CASES = ("vllm-resident", "vllm-offloaded", "ours-resident", "ours-whole-layer", "ours-spread")


def spec(small: bool) -> Any:
    from appliance.checkpoint.synth import SynthSpec

    sizes = {"hidden_size": 256, "intermediate_size": 128} if small else {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "heads": 32, "kv_heads": 8}  # fmt: skip
    return SynthSpec(layers=LAYERS, dense_layers=0, experts=EXPERTS, top_k=6, **sizes)


def dense_folder(work: Path, model: Path) -> Path:
    """The same model without EXL3: configuration and tokenizer only, weights are drawn by vLLM."""
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
        offload = {"cpu_offload_gb": round(ONE_LAYER_GB, 2)} if name == "vllm-offloaded" else {}
        return {"model": str(dense_folder(a.work, model)), "load_format": "dummy",
                "dtype": "bfloat16", **offload}  # fmt: skip
    vram = 1.0 if name == "ours-resident" else 2 / 3
    case = Case(0, vram=vram, whole_layers=name == "ours-whole-layer")
    plan_file = a.work / f"{name}.plan.json"
    made = make_plan(model, case, None, a.device, 1, False)
    made.write(plan_file)
    ours = {"plan": str(plan_file), "checkpoint": str(model), "traffic": ""}
    return {
        "model": str(model),
        "load_format": "made_in_memory",
        "dtype": "float16" if a.device == "cuda" else "float32",
        "worker_cls": "traffic_worker.MadeInMemoryWorker",
        "additional_config": {"appliance": ours},
    }


def measure(a: Any, name: str) -> None:
    from vllm import LLM, SamplingParams

    gpu = a.device == "cuda"
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
              "cudagraph_capture_sizes": [1, 2, 4, 6]}  # fmt: skip
    start = time.perf_counter()
    llm = LLM(
        **options(a, name),
        compilation_config=graphs if gpu else {"custom_ops": ["all", "-rotary_embedding"]},
        enforce_eager=not gpu,
        kv_cache_memory_bytes=1 << 28,
        max_model_len=512,
        max_num_seqs=6,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    load_s = round(time.perf_counter() - start, 1)
    if name.startswith("ours"):
        llm.collective_rpc("appliance_reset")
    steps = {}
    for streams in (1, 4, 6):
        asked = [{"prompt_token_ids": [5 + s, 6, 7]} for s in range(streams)]

        def generate(tokens: int, asked: Any = asked) -> float:
            began = time.perf_counter()
            how = SamplingParams(temperature=0.8, seed=7, max_tokens=tokens, ignore_eos=True)
            llm.generate(asked, how, use_tqdm=False)
            return time.perf_counter() - began

        generate(2)
        # As many steps as two seconds hold, at most 64: an offloaded layer may take half of one.
        count = min(64, max(3, int(2.0 / max(1e-3, generate(4) - generate(2)) * 2)))
        differences = [generate(8 + count) - generate(8) for _ in range(3)]
        steps[str(streams)] = round(sorted(differences)[1] / count * 1e3, 3)
    say(case=name, load_s=load_s, step_ms=steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for a case")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    if not (a.work / "model").exists():
        make_model(a.work / "model", spec(a.small))
    if a.case:
        measure(a, a.case)
        return 0
    say(predicted={
        "vllm, one of three layers offloaded": "6 experts of 70.8 MB a token: 8.3 ms at 51 GB/s "
        "if it reads in place what was picked, 530 ms if it copies the layer",
        "ours, one of three layers on the host": "6 experts of 13.3 MB: 1.56 ms at 51 GB/s",
        "ours, a third of every layer": "the same bytes, 1.56 ms at 1 stream",
    })  # fmt: skip
    return run_cases(a.only, a.work, a.limit)


if __name__ == "__main__":
    sys.exit(main())
