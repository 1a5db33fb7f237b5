"""On a GPU machine: plan, measure at the plan's scale, plan again with what was measured, pin it.

    python3 tests/gpu/measured_plan.py OUT [--model glm-5.3-flash] [--host-share 0.3]

Prints one JSON line a step: the trial registration of as many bytes as the plan pins (a watchdog
stops it before the host is starved), link rates of the plan before and after the measurement, the
time to place and pin the second plan's bytes, and the same for a mapped file (8 GiB). OUT keeps the
plans, the recording and preflight's report. The model is headers alone: no weights are needed.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "kernels")]

from appliance.plan.model import Plan, load_plan  # noqa: E402
from preflight import plan_needs  # noqa: E402

GIB = 1 << 30
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}"}


def appliance(*words: object, fine: tuple[int, ...] = (0,)) -> str:
    command = [sys.executable, "-m", "appliance.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    if done.returncode not in fine:
        sys.exit(f"{' '.join(map(str, words))} gave {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def say(step: str, **facts: object) -> None:
    print(json.dumps({"step": step, **facts}), flush=True)


def rates(plan: Plan) -> list[float | None]:
    return [rank.link_bytes_per_second for rank in plan.ranks]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="glm-5.3-flash")
    parser.add_argument("--host-share", default="0.3")
    asked = parser.parse_args()
    out, model = asked.out, asked.out / "model"
    out.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        appliance("weights", "synth", model, "--headers-only", asked.model)

    def planned(name: str, *more: object) -> Plan:
        share = ["--host-share", asked.host_share]
        appliance("plan", "make", "--model", model, "--out", out / name, *share, *more)
        return load_plan(out / name)

    first = planned("plan-1.json")
    needs = plan_needs(first.model_dump(mode="json"))
    say("plan", pinned_gib=round(needs.pinned_bytes / GIB, 2), link_rates=rates(first))
    report = appliance(
        "preflight", "--measure", "--plan", out / "plan-1.json", "--record", out / "recording",
        "--json", fine=(0, 3, 4),
    )  # fmt: skip
    (out / "preflight.json").write_text(report)
    seen = json.loads((out / "recording" / "recording.json").read_text())["measured"]
    say("measure", **seen)
    second = planned("plan-2.json", "--host", out / "recording")
    say("plan again", link_rates=rates(second))
    sys.stdout.write(appliance("plan", "diff", out / "plan-1.json", out / "plan-2.json"))
    again = planned("plan-3.json", "--host", out / "recording")
    say("and again", same_bytes=again.to_json() == second.to_json())
    pinned = plan_needs(second.model_dump(mode="json")).pinned_bytes
    for arguments in (["--gib", str(-(-pinned // GIB))], ["--gib", "8", "--file", "/tmp/blocks"]):
        command = [sys.executable, "-m", "appliance.engine.bench_arena", *arguments]
        subprocess.run(command, check=True, env=ENVIRONMENT)


if __name__ == "__main__":
    main()
