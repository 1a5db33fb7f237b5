"""Poison the host arena of a served model, and say whose outputs changed:

    python poison.py MODEL PLAN.json OUT.json

OUT: {"changed": {layer: [experts]}, "host": {layer: [experts]}, "proof_before", "proof_after"}.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="appliance",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)


def outputs(live, expert):  # type: ignore[no-untyped-def]
    import torch

    from expert_kernels import ops

    x = torch.randn(2, live.table.hidden_size, generator=torch.Generator().manual_seed(0))
    row = torch.full((2, 1), live.experts.index(expert))
    return ops.experts(x, torch.ones(2, 1), row, live.table)


def main() -> None:
    model, plan, out = sys.argv[1:4]
    from vllm import LLM

    llm = LLM(
        model,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        worker_cls="appliance.engine.worker.Worker",
        additional_config={"appliance": {"plan": plan, "checkpoint": model}},
    )
    from appliance.engine.rank import state

    current = state()
    before = {(i, e): outputs(v, e) for i, v in current.live.items() for e in v.experts}
    proof_before = llm.collective_rpc("appliance_prove")
    current.arena.pools["host"].memory.bitwise_xor_(0x5A)
    changed: dict[int, list[int]] = {}
    for (index, expert), old in before.items():
        if not outputs(current.live[index], expert).equal(old):
            changed.setdefault(index, []).append(expert)
    host = {p.layer: sorted(p.host_experts) for p in current.arena.plan.layers}
    proof_after = llm.collective_rpc("appliance_prove")
    result = {
        "changed": changed,
        "host": host,
        "proof_before": proof_before,
        "proof_after": proof_after,
    }
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
