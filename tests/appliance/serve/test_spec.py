"""ServeSpec: the exact command, for people to read and for the engine to obey."""

import itertools
import json
import shlex
from pathlib import Path

import pytest

from appliance.errors import UsageError
from appliance.plan.model import RankPlan, Serving
from appliance.serve.spec import MOST_PICKS, MOST_ROWS, Wishes, capture_sizes, spec
from appliance.serve.state import Files
from expert_kernels import launch

from .conftest import plan

FILES = Files.of(Path("/state"))
WISHES = Wishes(engine_python="/venv/bin/python", host="127.0.0.1", port=8000)

CPU_ARGV = """
/venv/bin/python -P -m vllm.entrypoints.cli.main serve /models/tiny
--host 127.0.0.1 --port 8000 --served-model-name tiny
--max-model-len 2048 --max-num-seqs 4 --max-num-batched-tokens 512
--kv-cache-memory-bytes 268435456 --tensor-parallel-size 1 --dtype float32 --enforce-eager
--compilation-config '{"custom_ops": ["all", "-rotary_embedding"]}'
--additional-config '{"appliance": {"plan": "/plans/plan.json", "checkpoint": "/models/tiny"}}'
--worker-cls appliance.engine.worker.Worker
--middleware appliance.gateway.Gateway
--api-server-count 1 --disable-fastapi-docs --disable-uvicorn-access-log --shutdown-timeout 60
"""


def made(a_plan, wishes=WISHES):
    return spec(a_plan, Path("/models/tiny"), Path("/plans/plan.json"), wishes, FILES)


def ranks(*devices):
    return tuple(
        RankPlan(rank=i, device=device, device_capacity_bytes=1, ledger=(), layers=())
        for i, device in enumerate(devices)
    )


def test_the_command_on_a_machine_without_a_gpu_is_exactly_this():
    assert list(made(plan()).argv) == shlex.split(CPU_ARGV)


def test_on_gpus_the_engine_chooses_its_type_and_captures_decode_steps_of_the_plans_streams():
    serving = Serving(streams=6, context_tokens=262144, prefill_chunk_tokens=8192,
                      kv_cache_bytes=8 << 30, kv_block_tokens=128)  # fmt: skip
    argv = made(plan(ranks=ranks("cuda", "cuda"), tensor_parallel=2, expert_parallel=True,
                     serving=serving)).argv  # fmt: skip
    pairs = dict(itertools.pairwise(argv))
    assert pairs["--tensor-parallel-size"] == "2" and "--enable-expert-parallel" in argv
    assert pairs["--block-size"] == "128" and pairs["--max-num-seqs"] == "6"
    assert not {"--dtype", "--enforce-eager", "--kv-cache-dtype"} & set(argv)
    in_fp8 = plan(ranks=ranks("cuda"), serving=serving.model_copy(update={"kv_cache_dtype": "fp8"}))
    assert dict(itertools.pairwise(made(in_fp8).argv))["--kv-cache-dtype"] == "fp8"
    assert pairs["--compilation-config"] == (
        '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", '
        '"cudagraph_capture_sizes": [1, 2, 3, 4, 5, 6]}'
    )
    assert 0 < float(pairs["--gpu-memory-utilization"]) <= 1, "the plan's share, not vLLM's 0.92"


@pytest.mark.parametrize(
    ("streams", "top_k", "draft", "sizes"),
    [
        (1, 6, 0, [1]),
        (6, 6, 0, [1, 2, 3, 4, 5, 6]),
        (6, 6, 3, [4, 8, 12, 16, 20, 24]),
        (20, 8, 0, [*range(1, 17), 20]),
        (200, 6, 0, [*range(1, 17), 24, 32, 40, 48, 56, 64]),
        (200, 6, 4, [*range(5, 61, 5)]),  # 80 rows are more than the kernels read in place
        (64, 32, 0, [*range(1, 17), 24, 32]),  # 1,024 picks
    ],
)
def test_no_step_is_captured_that_the_kernels_cannot_take_in_a_graph(streams, top_k, draft, sizes):
    assert capture_sizes(streams, top_k, draft) == sizes


def test_the_limits_of_capture_are_those_of_the_kernels():
    assert (MOST_ROWS, MOST_PICKS) == (launch.MAX_TOKENS, launch.MAX_PICKS)


def test_the_environment_names_files_and_closes_vllms_own_doors():
    environment = made(plan()).environment
    assert environment["VLLM_PLUGINS"] == "appliance"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_HOST_IP"] == "127.0.0.1", "ranks talk on loopback"
    assert environment["APPLIANCE_GATEWAY_KEYS"] == "/state/keys"
    assert environment["APPLIANCE_GATEWAY_CONTROL_KEY"] == "/state/control-key"


def test_several_ranks_without_gpus_are_not_bound_to_a_memory_node_each():
    alone, pair = (
        made(plan(ranks=ranks(*["cpu"] * n), tensor_parallel=n)).environment for n in (1, 2)
    )
    assert "VLLM_CPU_OMP_THREADS_BIND" not in alone
    assert (pair["VLLM_CPU_OMP_THREADS_BIND"], pair["OMP_NUM_THREADS"]) == ("nobind", "1")


def test_a_shell_reads_the_printed_command_back_to_the_same_words():
    words = shlex.split(made(plan()).command())
    assert words[0] == "env" and "VLLM_API_KEY" in words
    assert words[-len(made(plan()).argv) :] == list(made(plan()).argv)


def test_a_prefill_chunk_smaller_than_the_streams_is_raised_to_them():
    serving = Serving(streams=9, context_tokens=64, prefill_chunk_tokens=4, kv_cache_bytes=1)
    argv = made(plan(serving=serving)).argv
    assert argv[argv.index("--max-num-batched-tokens") + 1] == "9"


def test_a_larger_model_is_expected_to_take_longer_and_is_given_longer():
    small, large = (
        made(plan(model=plan().model.model_copy(update={"size_bytes": size})))
        for size in (10**9, 332 * 10**9)
    )
    assert large.load_seconds - small.load_seconds == pytest.approx(331, abs=1)
    assert large.start_limit_seconds > 4000 > small.start_limit_seconds > 900


def test_a_plan_of_two_kinds_of_device_is_refused():
    with pytest.raises(UsageError, match="mixes devices over its ranks: cpu, cuda"):
        made(plan(ranks=ranks("cuda", "cpu"), tensor_parallel=2))


def test_paths_come_out_absolute():
    found = spec(plan(), Path("m"), Path("p.json"), WISHES, FILES)
    ours = json.loads(found.argv[found.argv.index("--additional-config") + 1])["appliance"]
    assert ours == {"plan": str(Path.cwd() / "p.json"), "checkpoint": str(Path.cwd() / "m")}
