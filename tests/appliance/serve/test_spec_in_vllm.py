"""vLLM's own parser takes every argument of the command, without and with GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.plan.model import RankPlan, Serving
from appliance.serve.spec import Wishes, spec
from appliance.serve.state import Files

from .conftest import plan

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for argv in json.loads(sys.argv[1]):
    found = vars(parser.parse_args(argv))
    names = ("port", "max_num_seqs", "kv_cache_memory_bytes", "block_size", "additional_config",
             "middleware", "enable_expert_parallel", "shutdown_timeout", "api_server_count")
    print("PARSED", json.dumps({name: found[name] for name in names}))
"""


@pytest.mark.engine
def test_vllm_parses_what_we_start_it_with():
    rank = RankPlan(rank=0, device="cuda", device_capacity_bytes=1, ledger=(), layers=())
    serving = Serving(streams=6, context_tokens=4096, prefill_chunk_tokens=8192,
                      kv_cache_bytes=8 << 30, kv_block_tokens=128)  # fmt: skip
    plans = plan(), plan(ranks=(rank,), expert_parallel=True, serving=serving)
    wishes = Wishes(engine_python="python", host="127.0.0.1", port=8000)
    made = [spec(one, Path("/m"), Path("/p.json"), wishes, Files.of(Path("/s"))) for one in plans]
    after_serve = [one.argv[one.argv.index("serve") + 1 :] for one in made]
    done = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps(after_serve)],
        env={**os.environ, **made[0].environment}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("PARSED ")]
    assert len(lines) == 2, done.stderr[-2000:]
    cpu, gpu = (json.loads(line.removeprefix("PARSED ")) for line in lines)
    assert cpu == {
        "port": 8000,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 1 << 28,
        "block_size": None,
        "additional_config": {"appliance": {"plan": "/p.json", "checkpoint": "/m"}},
        "middleware": ["appliance.gateway.Gateway"],
        "enable_expert_parallel": False,
        "shutdown_timeout": 60,
        "api_server_count": 1,
    }
    assert (gpu["block_size"], gpu["enable_expert_parallel"]) == (128, True)
