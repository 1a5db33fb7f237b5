"""What a user feels on the same cards: experts on the host, all resident, vLLM's own both ways.

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/three_way.py --work /tmp/three --ranks 2

Four servers beside each other: ours with 30 % of the experts on the host and ours with all in VRAM
(`appliance up`, proved), stock vLLM in bf16 with --cpu-offload-gb for the same share of them, and
stock vLLM with all in VRAM. First one answer of each is timed, then the bench runs agent turns
against each in turn, at 1, 2, 4 and 6 streams. A bench that is ended at its limit still gives the
blocks that it had finished. `--kill`: at the end a worker of the first is killed: how long until
the appliance has failed, and what it says.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels"), str(REPO / "tests" / "gpu")]

from environment import descendants, engine_environment, say, write_plugin_metadata  # noqa: E402
from offload import dense_folder  # noqa: E402
from served import specs  # noqa: E402

SHARE = 0.3
PORTS = {"host": 8101, "resident": 8102, "vllm-offload": 8103, "vllm-resident": 8104}
SHAPE = {
    "system_tokens": 300,
    "turns": {"median": 4, "p95": 8, "least": 1, "most": 10},
    "input_tokens": {"median": 100, "p95": 400, "least": 8, "most": 600},
    "short_output_tokens": {"median": 48, "p95": 80, "least": 32, "most": 100},
    "long_share": 0,
    "most_context_tokens": 1200,  # as the bench counts; of this tokenizer two and a half times that
}


class Servers:
    def __init__(self, a: Any) -> None:
        self.a, self.environment = a, engine_environment(a.work / "plugin")
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def appliance(self, name: str, *words: str, log: str) -> subprocess.Popen[bytes]:
        environment = self.environment | {
            "APPLIANCE_STATE_DIR": str(self.a.work / name),
            "APPLIANCE_ENGINE_PYTHON": sys.executable,
        }
        command = [sys.executable, "-m", "appliance.cli", *words]
        with (self.a.work / log).open("w") as file:
            return subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    def start_ours(self, name: str, share: float) -> None:
        from appliance.checkpoint.exl3 import read_checkpoint
        from appliance.plan.planner import plan
        from appliance.plan.request import Policy
        from preflight import inspect
        from preflight.source import Live

        policy = Policy(device=self.a.device, tensor_parallel=self.a.ranks, host_share=share,
                        cache_slots=0, streams=6, conversations=6, context_tokens=4096,
                        prefill_chunk_tokens=2048)  # fmt: skip
        made = plan(inspect(Live()), read_checkpoint(self.a.work / "model"), None, policy)
        ranks = tuple(rank.model_copy(update={"numa_node": None}) for rank in made.ranks)
        made.model_copy(update={"ranks": ranks}).write(self.a.work / f"{name}.plan.json")
        predicted = {
            p.streams: round(p.tokens_per_second.likely, 1)
            for p in made.predictions
            if p.streams in (1, 2, 4, 6) and p.tokens_per_second is not None
        }
        say(server=name, predicted_tokens_per_s=predicted)
        words = ("up", "--model", str(self.a.work / "model"), "--name", "model", "--port",
                 str(PORTS[name]), "--plan", str(self.a.work / f"{name}.plan.json"))  # fmt: skip
        self.running[name] = self.appliance(name, *words, log=f"{name}.log")

    def start_vllm(self, name: str, offload_gib: float) -> None:
        folder = dense_folder(self.a.work, self.a.work / "model")
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
                  "cudagraph_capture_sizes": [1, 2, 3, 4, 5, 6]}  # fmt: skip
        plain = {"custom_ops": ["all", "-rotary_embedding"]}
        gpu = self.a.device == "cuda"
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
            *("--load-format", "dense_twin", "--dtype", "bfloat16", "--served-model-name", "model"),
            *("--port", str(PORTS[name]), "--host", "127.0.0.1"),
            *("--tensor-parallel-size", str(self.a.ranks)),
            *("--max-model-len", "4096", "--max-num-seqs", "6", "--max-num-batched-tokens", "2048"),
            *("--kv-cache-memory-bytes", str(2 << 30 if gpu else 1 << 28)),
            *("--gpu-memory-utilization", "0.3"),
            *("--disable-custom-all-reduce", "--disable-uvicorn-access-log"),
            *("--compilation-config", json.dumps(graphs if gpu else plain)),
            *(() if gpu else ("--enforce-eager",)),
        ]
        if offload_gib:
            command += ["--cpu-offload-gb", f"{offload_gib:.2f}", "--cpu-offload-params", "experts"]
        log = (self.a.work / f"{name}.log").open("w")
        environment = self.environment | {
            "VLLM_PLUGINS": "dense_twin",
            "DENSE_SOURCE": str(self.a.work / "model"),
        }
        self.running[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def ready(self, name: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.running[name].poll() is None:
            if name.startswith("vllm"):
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

    def key(self, name: str) -> Path | None:
        file = self.a.work / name / "keys"
        return file if file.exists() else None

    def one_answer(self, name: str, tokens: int = 24, limit: float = 20.0) -> None:
        """Gaps between the tokens of one answer; where it takes longer than the limit, so far."""
        from appliance.serve.keys import first_key

        key = self.key(name)
        asked = {"model": "model", "prompt": "One answer", "max_tokens": tokens, "temperature": 0}
        asked |= {"stream": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        headers |= {} if key is None else {"Authorization": f"Bearer {first_key(key)}"}
        times: list[float] = []
        server = http.client.HTTPConnection("127.0.0.1", PORTS[name], timeout=limit)
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            server.request("POST", "/v1/completions", json.dumps(asked), headers)
            answer = server.getresponse()
            while time.monotonic() - began < limit and (line := answer.readline()):
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
        gaps = [round((b - a) * 1e3, 2) for a, b in pairwise(times)]
        first = round((times[0] - began) * 1e3, 1) if times else None
        median = round(statistics.median(gaps), 2) if gaps else None
        say(one_answer=name, first_token_ms=first, gaps_ms=gaps, median_gap_ms=median,
            at_least_ms=None if len(times) >= tokens else round(limit * 1e3))  # fmt: skip

    def bench(self, name: str, streams: str, seconds: float, limit: float) -> None:
        from appliance.bench.record import Record
        from appliance.bench.report import report
        from appliance.errors import ApplianceError

        out, shape = self.a.work / f"turns-{name}", self.a.work / "shape.json"
        shape.write_text(json.dumps(SHAPE))
        words = ["bench", "turns", "--streams", streams, "--seconds", str(seconds),
                 "--shape", str(shape), "--out", str(out),
                 "--url", f"http://127.0.0.1:{PORTS[name]}/v1", "--model", "model"]  # fmt: skip
        key = self.key(name)
        words += [] if key is None else ["--key-file", str(key)]
        process = self.appliance(name, *words, log=f"bench-{name}.log")
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            code = None
        said = (self.a.work / f"bench-{name}.log").read_text()[-1500:]
        try:
            found = report(Record(out))
        except ApplianceError as error:
            say(bench=name, code=code, nothing=str(error), said=said)
            return
        for line in found.lines:
            say(bench=name, streams=line.streams, turns=line.turns, p5=round(line.p5, 2),
                tokens_per_s=round(line.median, 2), worst=round(line.worst, 2),
                first_token_p95_s=line.first_token_p95)  # fmt: skip
        say(bench=name, code=code, problems=found.problems, said=said)

    def end(self) -> None:
        for process in self.running.values():
            for pid in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def kill_a_rank(self, name: str) -> None:
        """Seconds from the death of a worker to an appliance that has failed, and its words."""
        state = json.loads((self.a.work / name / "state.json").read_text())
        workers = descendants(state["engine_pid"])
        names = {pid: _name(pid) for pid in workers}
        victim = max((p for p, n in names.items() if "Worker" in n), default=workers[-1])
        os.kill(victim, 9)
        start = time.monotonic()
        while time.monotonic() - start < 90 and self.phase(name) != "failed":
            time.sleep(0.1)
        after = json.loads((self.a.work / name / "state.json").read_text())
        seconds = round(time.monotonic() - start, 1)
        left = workers
        while left and time.monotonic() - start < 30:  # Python's resource tracker goes last
            left = [p for p in left if Path(f"/proc/{p}").exists()]
            time.sleep(0.1)
        gone = round(time.monotonic() - start, 1)
        say(killed=names[victim], seconds=seconds, phase=after["phase"], message=after["message"],
            left=[_name(p) for p in left], all_gone_after_s=gone)  # fmt: skip


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
    parser.add_argument("--start-limit", type=float, default=120.0, help="seconds, for all servers")
    parser.add_argument("--bench-limit", type=float, default=70.0, help="seconds, a server")
    parser.add_argument("--only", nargs="+", choices=list(PORTS), default=list(PORTS))
    parser.add_argument("--kill", action="store_true", help="a rank, at the end")
    a = parser.parse_args()
    a.work.mkdir(parents=True, exist_ok=True)
    write_plugin_metadata(a.work / "plugin", dense_twin="dense_loader:register")
    spec = specs(64)[a.model]
    if not (a.work / "model").exists():
        from appliance.checkpoint.synth import synthesize

        synthesize(a.work / "model", spec)
    say(predicted={
        "median tokens/s of 1 stream": "resident 400 to 480 (2.1 ms a step), 30 % on the host 350 "
        "to 400 (2.6 ms), vLLM resident about as ours; offloaded 354 MB of bf16 a step and rank: "
        "7 ms at 51 GB/s, 60 to 140 tokens/s",
        "6 streams": "ours 30 % on the host 4.5 ms a step, 200; vLLM offloaded 30 ms or more, 33",
        "a killed rank": "the appliance has failed within 60 s and says so",
    })  # fmt: skip
    servers = Servers(a)
    experts = 3 * spec.layers * spec.experts * spec.hidden_size * spec.intermediate_size * 2
    starts = {
        "host": lambda: servers.start_ours("host", SHARE),
        "resident": lambda: servers.start_ours("resident", 0.0),
        "vllm-offload": lambda: servers.start_vllm(
            "vllm-offload", SHARE * experts / a.ranks / 2**30
        ),
        "vllm-resident": lambda: servers.start_vllm("vllm-resident", 0.0),
    }
    began = time.monotonic()
    try:
        for name in a.only:
            starts[name]()
        up = []
        for name in a.only:
            if servers.ready(name, max(1.0, a.start_limit - (time.monotonic() - began))):
                up.append(name)
                say(server=name, ready_after_s=round(time.monotonic() - began, 1))
            else:
                log = a.work / f"{name}.log"
                say(server=name, ready=False, log=log.read_text(errors="replace")[-2500:])
        for name in up:
            servers.one_answer(name)
        for name in up:
            servers.bench(name, a.streams, a.seconds, a.bench_limit)
        if a.kill and "host" in up:
            servers.kill_a_rank("host")
    finally:
        servers.end()
    return 0 if up == a.only else 1


if __name__ == "__main__":
    sys.exit(main())
