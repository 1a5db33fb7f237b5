"""Two cards with unequal links: a plan for the links as measured against a plan for equal ones.

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/links.py --work /tmp/links --counts *.json

Another process takes a part of one card's link: it copies from pinned memory without end, or, where
that does not slow our reads, reads in place with a kernel, which takes the card itself in turns.
What each link then gives our reads is measured; one plan is made for it and one for equal links;
both are served, TP 2, while the other process goes on. One JSON line a measurement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels"), str(REPO / "tests" / "gpu")]

from environment import leave, my_turn, run_cases, say  # noqa: E402
from made import PLANNED, Case, heat_of, make_model, make_plan, model_spec, traffic  # noqa: E402
from traffic import Engine  # noqa: E402

STATIC = Case(0)
SLOWED = 0.85  # of the other link: less is worth another plan


class Neighbour:
    """A process that uses one card's link without end, by `what`: copy or read."""

    def __init__(self, gpu: int, what: str) -> None:
        command = [sys.executable, str(Path(__file__)), "--neighbour", what, "--gpu", str(gpu)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Neighbour:
        assert self.process.stdout is not None
        if not self.process.stdout.readline():  # its first round: it is at work
            raise RuntimeError("the process that uses the link ended before its first round")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()


def use_the_link(gpu: int, what: str) -> None:
    """What the neighbour does: eight rounds of 256 MiB are always queued."""
    from preflight.measuring.rates import rig

    with rig(gpu, None) as one:
        work = one.copy if what == "copy" else one.read
        one.rate(work(8))
        print("at work", flush=True)
        ahead = work(8)
        while True:
            after = work(8)
            one.rate(ahead)
            ahead = after


def rates() -> list[float]:
    """Bytes a second that a kernel reads over each card's link now."""
    from preflight.measuring.rates import rig

    found = []
    for gpu in (0, 1):
        with rig(gpu, None) as one:
            one.rate(one.read(8))
            found.append(statistics.median(one.rate(one.read(20)) for _ in range(3)))
    return found


def measure(a: Any, name: str) -> None:
    topics = traffic(a.counts, a.layers if not a.small else 3, "")
    links = json.loads((a.work / "rates.json").read_text()) if name == "as-measured" else None
    made = make_plan(a.work / "model", STATIC, heat_of(topics, ""), a.device, 2, False, links)
    engine = Engine(a, name, made, topics)
    host = [sum(len(p.host_experts) for p in rank.layers) for rank in made.ranks]
    predicted = [p.model_dump(mode="json") for p in made.predictions if p.streams in a.streams]
    say(case=name, load_s=engine.load_s, host_experts=host, predicted=predicted)
    turn = my_turn(a.work, name, a.beside)  # noqa: F841  # held until the end
    engine.ask("appliance_reset")
    engine.ask("traffic_route", PLANNED)
    steps = {}
    for streams in a.streams:
        engine.run(streams, 20 if a.device == "cuda" else 2)
        found = [engine.run(streams, 100 if a.device == "cuda" else 4) for _ in range(3)]
        for one in found:
            say(case=name, **one)
        steps[str(streams)] = statistics.median(one["step_ms"] for one in found)
    (a.work / f"{name}.steps.json").write_text(json.dumps(steps))
    leave()


def measured_links(a: Any, what: str) -> bool:
    """Whether the neighbour makes its link clearly slower than the other; rates.json has both."""
    found = rates() if a.device == "cuda" else [50e9, 25e9]
    (a.work / "rates.json").write_text(json.dumps(found))
    say(neighbour=what, on_gpu=a.gpu, read_gb_s=[round(rate / 1e9, 2) for rate in found])
    return found[a.gpu] < SLOWED * found[1 - a.gpu]


def serve_both(a: Any) -> int:
    code = run_cases(["equal", "as-measured"], a.work, a.limit, together=True)
    files = [a.work / f"{name}.steps.json" for name in ("equal", "as-measured")]
    if all(file.exists() for file in files):
        equal, better = (json.loads(file.read_text()) for file in files)
        ratios = {s: round(better[s] / equal[s], 3) for s in equal}
        say(step_of_the_plan_for_measured_links_over_equal=ratios)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--counts", type=Path, nargs="+")
    parser.add_argument("--gpu", type=int, default=1, help="whose link is taken")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for both plans")
    parser.add_argument("--neighbour", choices=("copy", "read"), help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--beside", nargs="+", help=argparse.SUPPRESS)
    a = parser.parse_args()
    a.ranks, a.ep = 2, False
    if a.neighbour:
        use_the_link(a.gpu, a.neighbour)
    if a.case:
        measure(a, a.case)
    a.work.mkdir(parents=True, exist_ok=True)
    make_model(a.work / "model", model_spec(a.small, a.layers))
    for file in a.work.glob("*.steps.json"):
        file.unlink()
    say(predicted={
        "read_gb_s": "51 alone; beside copies about half of it",
        "experts on the host": "as the links' speeds, within what whole layers allow",
        "step": "falls: both links are ready at once, instead of the slow one last. At 51 and 26 "
        "GB/s the link's part of a step is 1.5 times shorter",
    })  # fmt: skip
    if a.device == "cpu":
        return serve_both(a) if measured_links(a, "none") else 1
    say(read_gb_s_alone=[round(rate / 1e9, 2) for rate in rates()])
    for what in ("copy", "read"):
        with Neighbour(a.gpu, what):
            if measured_links(a, what) or what == "read":
                return serve_both(a)
    return 1


if __name__ == "__main__":
    sys.exit(main())
