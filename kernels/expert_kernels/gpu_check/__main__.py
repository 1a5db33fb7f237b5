"""Every CUDA op against the float64 reference, on this GPU: `python -m expert_kernels.gpu_check`.

One JSON line a section, each on its own: one that fails or hangs does not stop the next. Exit code
1 if any failed. Inputs are random in every call; outputs are compared whole.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import torch

from expert_kernels import build, interface
from expert_kernels.gpu_check import decode, dense, graphs, rows, small, write_through
from expert_kernels.gpu_check.compare import Facts, Section


def environment() -> Iterator[Facts]:
    p = torch.cuda.get_device_properties(0)
    architecture = f"sm_{p.major}{p.minor}"
    start = time.perf_counter()
    path = build.library_path(architecture)
    interface.library(architecture)
    yield {
        "ok": True,
        "gpu": p.name,
        "architecture": architecture,
        "multiprocessors": p.multi_processor_count,
        "torch": torch.__version__,
        "library": path.name,
        "prebuilt": path in build.PREBUILT,
        "source": build.source_of(path),
        "seconds": round(time.perf_counter() - start, 1),
    }


def summarise(lines: list[Facts]) -> Facts:
    """Of a section with many cases: how many, the worst error, and those that failed, whole."""
    errors = [line["error"] for line in lines if "error" in line]
    return {
        "ok": bool(lines) and all(line["ok"] for line in lines),
        "cases": len(lines),
        "worst_error": max(errors, default=None),
        "failed": [line for line in lines if not line["ok"]][:6],
        **({} if len(lines) > 1 else lines[0]),
    }


def run(sections: dict[str, Section]) -> None:
    """Each in turn, one line before and one after; ends at the first broken CUDA context."""
    for name, section in sections.items():
        _say({"section": name, "begins": True})
        start, lines, failure = time.perf_counter(), [], None
        try:
            for line in section():
                lines.append(line)
            torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 (a section that fails must not hide the others)
            failure = traceback.format_exc().splitlines()[-6:]
        facts = summarise(lines) if lines else {"ok": False}
        if failure:
            facts |= {"ok": False, "exception": failure}
        _say({"section": name, **facts, "wall_s": round(time.perf_counter() - start, 1)})
        if failure and any("CUDA error" in line for line in failure):
            return


def supervise(names: list[str], options: list[str], seconds: float) -> bool:
    """Runs the sections in a child, and the rest in a new one if it dies or says nothing for long.

    A broken or hung CUDA context takes its whole process with it; the parent has none.
    """
    left, fine = list(names), True
    while left:
        command = [sys.executable, "-u", "-m", "expert_kernels.gpu_check", "--child", *options]
        child = subprocess.Popen([*command, "--only", *left], stdout=subprocess.PIPE)
        assert child.stdout is not None
        timer: threading.Timer | None = None
        for raw in child.stdout:
            if timer is not None:
                timer.cancel()
            timer = threading.Timer(seconds, child.kill)
            timer.start()
            facts = json.loads(raw)
            if "begins" not in facts:
                left.remove(facts["section"])
                fine = fine and facts["ok"]
                _say(facts)
        code = child.wait()
        if timer is not None:
            timer.cancel()
        if left and (code != 0 or len(left) == len(names)):
            fine = False
            _say({"section": left.pop(0), "ok": False, "died": code, "limit_s": seconds})
        names = list(left)
    return fine


def _say(facts: Facts) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m expert_kernels.gpu_check", description=__doc__)
    parser.add_argument("--only", nargs="+", help="sections to run")
    parser.add_argument("--steps", type=int, default=10_000, help="of the stress run")
    parser.add_argument("--stress-seconds", type=float, default=40.0)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds a section may take")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    sections: dict[str, Section] = {
        "environment": environment,
        "reconstruct": dense.reconstruct,
        "formats": decode.formats,
        "rows": decode.rows,
        "splits": decode.splits,
        "odd_picks": decode.odd_picks,
        "real_shapes": decode.real_shapes,
        "prefill": dense.prefill,
        "prefill_formats": dense.prefill_formats,
        "linear": dense.linear,
        "write_through": write_through.write_through,
        "lookups": rows.lookups,
        "small": small.small,
        "graph": graphs.graph,
        "back_to_back": graphs.back_to_back,
        "stress": lambda: graphs.stress(a.steps, a.stress_seconds),
        "promotions": lambda: write_through.promotions(a.steps, a.stress_seconds),
    }
    names = [name for name in sections if not a.only or name in a.only]
    if a.child:
        run({name: sections[name] for name in names})
        return 0
    options = ["--steps", str(a.steps), "--stress-seconds", str(a.stress_seconds)]
    return 0 if supervise(names, options, a.limit) else 1


if __name__ == "__main__":
    sys.exit(main())
