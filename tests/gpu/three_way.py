"""What a user feels on the same cards: experts on the host, all resident, vLLM's own offload.

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/three_way.py --work /tmp/three --ranks 2

Three servers beside each other: ours with 30 % of the experts on the host, ours with all in VRAM
(`appliance up`, proved), and stock vLLM in bf16 with --cpu-offload-gb for the same share of the
experts. The bench runs agent turns against each in turn, at 1, 2, 4 and 6 streams. At the end a
worker of the first is killed: how long until the appliance has failed and says why.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels"), str(REPO / "tests" / "gpu")]

from environment import engine_environment, say, write_plugin_metadata  # noqa: E402
from serve_gpu import specs  # noqa: E402

SHARE = 0.3
PORTS = {"host": 8101, "resident": 8102, "vllm-offload": 8103}
SHAPE = {
    "system_tokens": 500,
    "turns": {"median": 4, "p95": 8, "least": 1, "most": 10},
    "input_tokens": {"median": 100, "p95": 400, "least": 8, "most": 600},
    "short_output_tokens": {"median": 60, "p95": 120, "least": 32, "most": 150},
    "long_output_tokens": {"median": 150, "p95": 300, "least": 100, "most": 300},
    "most_context_tokens": 3500,
}


class Servers:
    def __init__(self, a: Any) -> None:
        self.a, self.environment = a, engine_environment(a.work / "plugin")
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def appliance(self, name: str, *words: str, wait: bool = True) -> Any:
        environment = self.environment | {
            "APPLIANCE_STATE_DIR": str(self.a.work / name),
            "APPLIANCE_ENGINE_PYTHON": sys.executable,
        }
        command = [sys.executable, "-m", "appliance.cli", *words]
        if wait:
            return subprocess.run(command, env=environment, capture_output=True, text=True)
        log = (self.a.work / f"{name}.log").open("w")
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def start_ours(self, name: str, share: float) -> None:
        from appliance.checkpoint.exl3 import read_checkpoint
        from appliance.plan.planner import plan
        from appliance.plan.request import Policy
        from preflight import inspect
        from preflight.source import Live

        policy = Policy(device=self.a.device, tensor_parallel=self.a.ranks, host_share=share,
                        streams=6, conversations=6, context_tokens=4096,
                        prefill_chunk_tokens=2048)  # fmt: skip
        made = plan(inspect(Live()), read_checkpoint(self.a.work / "model"), None, policy)
        ranks = tuple(rank.model_copy(update={"numa_node": None}) for rank in made.ranks)
        made.model_copy(update={"ranks": ranks}).write(self.a.work / f"{name}.plan.json")
        words = ("up", "--model", str(self.a.work / "model"), "--name", "model", "--port",
                 str(PORTS[name]), "--plan", str(self.a.work / f"{name}.plan.json"))  # fmt: skip
        self.running[name] = self.appliance(name, *words, wait=False)

    def start_vllm(self, offload_gib: float) -> None:
        from offload import dense_folder

        folder = dense_folder(self.a.work, self.a.work / "model")
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
            *("--load-format", "dummy", "--dtype", "bfloat16", "--served-model-name", "model"),
            *("--port", str(PORTS["vllm-offload"]), "--host", "127.0.0.1"),
            *("--tensor-parallel-size", str(self.a.ranks)),
            *("--cpu-offload-gb", f"{offload_gib:.2f}"),
            *("--max-model-len", "4096", "--max-num-seqs", "6"),
            *("--kv-cache-memory-bytes", str(2 << 30), "--gpu-memory-utilization", "0.3"),
            *("--disable-custom-all-reduce", "--compilation-config"),
            json.dumps({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
                        "cudagraph_capture_sizes": [1, 2, 4, 6]}),
        ]  # fmt: skip
        log = (self.a.work / "vllm-offload.log").open("w")
        self.running["vllm-offload"] = subprocess.Popen(
            command, env=self.environment | {"VLLM_PLUGINS": ""}, stdout=log, stderr=log
        )

    def ready(self, name: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.running[name].poll() is None:
            if name == "vllm-offload":
                try:
                    with urllib.request.urlopen(
                        f"http://127.0.0.1:{PORTS[name]}/health", timeout=2
                    ):
                        return True
                except OSError:
                    pass
            elif self.phase(name) in ("ready", "unproved"):
                return True
            time.sleep(0.5)
        return False

    def phase(self, name: str) -> str | None:
        file = self.a.work / name / "state.json"
        return str(json.loads(file.read_text())["phase"]) if file.exists() else None

    def bench(self, name: str, streams: str, seconds: float) -> None:
        out, shape = self.a.work / f"turns-{name}", self.a.work / "shape.json"
        shape.write_text(json.dumps(SHAPE))
        words = ["bench", "turns", "--streams", streams, "--seconds", str(seconds),
                 "--shape", str(shape), "--out", str(out),
                 "--url", f"http://127.0.0.1:{PORTS[name]}/v1", "--model", "model"]  # fmt: skip
        keys = self.a.work / name / "keys"
        if keys.exists():
            words += ["--key-file", str(keys)]
        done = self.appliance(name, *words)
        say(bench=name, code=done.returncode, said=done.stdout[-3000:], talk=done.stderr[-600:])

    def kill_a_rank(self, name: str) -> None:
        """Seconds from the death of a worker to an appliance that has failed, and its words."""
        state = json.loads((self.a.work / name / "state.json").read_text())
        workers = _children(state["engine_pid"])
        names = {pid: _name(pid) for pid in workers}
        victim = max((p for p, n in names.items() if "Worker" in n), default=workers[-1])
        os.kill(victim, 9)
        start = time.monotonic()
        while time.monotonic() - start < 90 and self.phase(name) != "failed":
            time.sleep(0.1)
        after = json.loads((self.a.work / name / "state.json").read_text())
        seconds = round(time.monotonic() - start, 1)
        left = [p for p in workers if Path(f"/proc/{p}").exists()]
        say(killed=names[victim], seconds=seconds, phase=after["phase"], message=after["message"],
            left=left)  # fmt: skip


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *_children(int(child))]
    return found


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=("large", "tiny"), default="large")
    parser.add_argument("--streams", default="1,2,4,6")
    parser.add_argument("--seconds", type=float, default=40.0, help="of the bench, a server")
    parser.add_argument("--only", nargs="+", choices=list(PORTS), default=list(PORTS))
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    write_plugin_metadata(a.work / "plugin")
    spec = specs(64)[a.model]
    if not (a.work / "model").exists():
        from appliance.checkpoint.synth import synthesize

        synthesize(a.work / "model", spec)
    say(predicted={
        "per stream, 1 stream": "resident 2 ms a step, 30 % on the host 2.7; vLLM's 8 to 500",
        "a killed rank": "the appliance has failed within 60 s and says so",
    })  # fmt: skip
    servers = Servers(a)
    experts = 3 * spec.layers * spec.experts * spec.hidden_size * spec.intermediate_size * 2
    starts = {
        "host": lambda: servers.start_ours("host", SHARE),
        "resident": lambda: servers.start_ours("resident", 0.0),
        "vllm-offload": lambda: servers.start_vllm(SHARE * experts / a.ranks / 2**30),
    }
    began = time.monotonic()
    for name in a.only:
        starts[name]()
    up = []
    for name in a.only:
        if servers.ready(name, 240):
            up.append(name)
            say(server=name, ready_after_s=round(time.monotonic() - began, 1))
        else:
            log = a.work / f"{name}.log"
            say(server=name, ready=False, log=log.read_text()[-2500:])
    for name in up:
        servers.bench(name, a.streams, a.seconds)
    if "host" in up:
        servers.kill_a_rank("host")
    for process in servers.running.values():
        process.terminate()
    return 0 if up == a.only else 1


if __name__ == "__main__":
    sys.exit(main())
