"""Greedy tokens of one model in one engine, as its own process:

    python generate.py MODEL PROMPTS.json OUT.json [LLM options as JSON]

OUT: {"vllm": version, "outputs": [{"tokens": [...], "logprobs": [...]}]} and, with our plugin,
"state": counters and homes of each rank, "proof": the proof of each rank.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_PLUGINS", "appliance")


def main() -> None:
    model, prompts_file, out = sys.argv[1:4]
    options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    if options.get("tensor_parallel_size", 1) == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from appliance.serve.spec import CPU_COMPILATION

    work = json.loads(Path(prompts_file).read_text())
    ours = "additional_config" in options
    if ours:
        options["worker_cls"] = "appliance.engine.worker.Worker"
    options["compilation_config"] = CPU_COMPILATION
    llm = LLM(model, enforce_eager=True, dtype="float32", max_model_len=512, **options)
    result: dict[str, object] = {"vllm": vllm.__version__}
    if ours:
        result["proof"] = llm.collective_rpc("appliance_prove")
        llm.collective_rpc("appliance_reset")
    sampling = SamplingParams(temperature=0, max_tokens=work["tokens"], ignore_eos=True, logprobs=1)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in work["prompts"]], sampling)
    result["outputs"] = [
        {
            "tokens": list(o.outputs[0].token_ids),
            "logprobs": [
                next(iter(step.values())).logprob for step in (o.outputs[0].logprobs or [])
            ],
        }
        for o in outputs
    ]
    if ours:
        result["state"] = llm.collective_rpc("appliance_state")
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
