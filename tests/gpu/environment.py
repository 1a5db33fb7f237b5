"""What an engine's process needs where nothing is installed: plugin metadata, variables."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

REPO = Path(__file__).resolve().parents[2]


def write_plugin_metadata(folder: Path, **plugins: str) -> None:
    """Metadata in `folder` by which vLLM finds this checkout's plugin, and others or another."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    info = folder / "moe_appliance-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-appliance\nVersion: 0.1.0\n")
    groups = project["entry-points"]
    groups["vllm.general_plugins"] |= plugins
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
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # where it is tried without a GPU
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
    }


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def run_cases(
    cases: Sequence[str], work: Path, limit_seconds: float, *, together: bool = False, **more: str
) -> int:
    """This script again for each case, in a process of its own; 1 where one died or took longer.

    `together`: they start at once, and each waits for its turn to measure (`my_turn`). The limit is
    for one case, or for all that run together. `more`: variables.
    """
    write_plugin_metadata(work / "plugin")
    groups = [list(cases)] if together else [[case] for case in cases]
    bad = [_run(group, work, limit_seconds, more) for group in groups]
    return int(any(bad))


def _run(cases: Sequence[str], work: Path, limit_seconds: float, more: Mapping[str, str]) -> bool:
    """Whether one died, or was ended at the limit with its ranks."""
    for case in cases:
        _loaded(work, case).unlink(missing_ok=True)
    running = {case: _start(case, cases, work, more) for case in cases}
    deadline, bad = time.monotonic() + limit_seconds, False
    while running:
        over = time.monotonic() > deadline
        for case, process in list(running.items()):
            if process.poll() is None and not over:
                continue
            with contextlib.suppress(ProcessLookupError):  # its ranks, too
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            del running[case]
            _loaded(work, case).touch()  # whoever waits for it need not
            if code or over:
                bad = True
                log = (work / f"{case}.log").read_text(errors="replace").splitlines()[-30:]
                say(case=case, died=code, over_the_limit=over, log=log)
        time.sleep(0.1)
    return bad


def _start(
    case: str, cases: Sequence[str], work: Path, more: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, *sys.argv, "--case", case, "--beside", *cases]
    with (work / f"{case}.log").open("w") as log:
        environment = engine_environment(work / "plugin") | more
        return subprocess.Popen(command, env=environment, stderr=log, start_new_session=True)


def _loaded(work: Path, case: str) -> Path:
    return work / f"{case}.loaded"


def my_turn(work: Path, case: str, beside: Sequence[str]) -> TextIO:
    """Loading takes the link: nobody measures before all have loaded or died. Then one at a time.

    Keep what is returned until the process ends: giving back pinned memory holds up others.
    """
    _loaded(work, case).touch()
    while not all(_loaded(work, other).exists() for other in beside):
        time.sleep(0.1)
    turn = (work / "turn").open("w")
    fcntl.flock(turn, fcntl.LOCK_EX)
    return turn


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def leave() -> NoReturn:
    """End at once, but after the engine's processes: their memory is given back before the next
    turn. What is measured is said; vLLM's own end takes seconds."""
    left = descendants(os.getpid())
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while left:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        left = [pid for pid in left if _lives(pid)]
        time.sleep(0.02)
    sys.stdout.flush()
    os._exit(0)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False
