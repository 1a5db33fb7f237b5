"""What an engine's process needs where nothing is installed: plugin metadata, variables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]


def write_plugin_metadata(folder: Path) -> None:
    """Metadata in `folder` by which vLLM finds the plugin in this checkout."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    info = folder / "moe_appliance-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-appliance\nVersion: 0.1.0\n")
    groups = project["entry-points"]
    lines = [f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for g, e in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


def engine_environment(plugin: Path) -> dict[str, str]:
    """The inherited environment, with the plugin and without what must stay off."""
    paths = [str(plugin), str(REPO), str(REPO / "kernels"), str(REPO / "tests" / "gpu")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_PLUGINS": "appliance",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # Nothing touches CUDA before the fork, and vLLM takes half a minute to import.
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        # NVLink multicast stays off: it can take a shared host's GPUs down.
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "VLLM_USE_NCCL_SYMM_MEM": "0",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the plan's order
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
    }


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def run_cases(cases: Sequence[str], work: Path, limit_seconds: float) -> int:
    """This script again for each case, in a process of its own; 1 where one died or took longer."""
    write_plugin_metadata(work / "plugin")
    codes = []
    for case in cases:
        log = work / f"{case}.log"
        codes.append(_run([sys.executable, *sys.argv, "--case", case], log, work, limit_seconds))
        if codes[-1]:
            say(case=case, died=codes[-1], log=log.read_text().splitlines()[-30:])
    return int(any(codes))


def _run(command: Sequence[str], log: Path, work: Path, limit_seconds: float) -> int:
    """The exit code, -1 where it was ended at the limit with its ranks."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=engine_environment(work / "plugin"), stderr=file, start_new_session=True
        )
        try:
            return process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return -1
