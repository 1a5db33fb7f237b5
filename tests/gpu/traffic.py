"""Decode over 32 layers of true experts whose routers follow recorded counts, in vLLM on a GPU.

    PYTHONPATH=VLLM:DEPENDENCIES python3 tests/gpu/traffic.py --work /tmp/traffic --counts *.json

`--counts`: files of counts by topic, one layer each; layers of the model take them in turn, with
the experts' numbers shuffled. One topic is left out of the plan and then served. All experts have
the same bytes, so one load serves every placement: the plan's slots still, following the traffic,
and as many experts on the host as whole layers. Each part begins with the plan's slots. One JSON
line a measurement, ratios at the end; first what is expected. `--small --device cpu` tries it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "kernels"), str(REPO / "tests" / "gpu")]

from environment import leave, run_cases, say  # noqa: E402
from made import (  # noqa: E402
    PLANNED,
    Case,
    Topics,
    heat_of,
    make_model,
    make_plan,
    model_spec,
    traffic,
)

CASES = {"slots-96": Case(96), "slots-64": Case(64)}
STILL: dict[str, float] = {"promotions_per_row": 0.0}
# Parts, in the order in which they are measured: what was missing comes first.
PARTS = ("held-out", "layers", "planned", "steady")  # steady: planned traffic as planned, alone


class Engine:
    """One vLLM over a plan; `a` has work, device, ranks, ep."""

    def __init__(self, a: Any, name: str, made: Any, topics: Topics) -> None:
        from vllm import LLM

        self.plan = made
        plan_file, counts_file = a.work / f"{name}.plan.json", a.work / f"{name}.traffic.json"
        made.write(plan_file)
        counts_file.write_text(json.dumps(topics))
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
                  "cudagraph_capture_sizes": [1, 2, 3, 4, 5, 6]}  # fmt: skip
        gpu = a.device == "cuda"
        start = time.perf_counter()
        self.llm = LLM(
            str(a.work / "model"),
            load_format="made_in_memory",
            dtype="float16" if gpu else "float32",
            enforce_eager=not gpu,
            compilation_config=graphs if gpu else {"custom_ops": ["all", "-rotary_embedding"]},
            tensor_parallel_size=a.ranks,
            enable_expert_parallel=a.ep,
            disable_custom_all_reduce=True,
            kv_cache_memory_bytes=1 << 30 if gpu else 1 << 28,
            gpu_memory_utilization=0.1,
            max_model_len=4096 if gpu else 512,
            max_num_seqs=6,
            max_num_batched_tokens=4096 if gpu else 512,
            enable_prefix_caching=False,
            disable_log_stats=True,
            worker_cls="traffic_worker.TrafficWorker",
            additional_config={"appliance": {
                "plan": str(plan_file), "checkpoint": str(a.work / "model"),
                "traffic": str(counts_file)}},
        )  # fmt: skip
        self.load_s = round(time.perf_counter() - start, 1)

    def ask(self, what: str, *words: Any) -> list[Any]:
        found: list[Any] = self.llm.collective_rpc(what, args=words)
        return found

    def run(self, streams: int, steps: int) -> dict[str, Any]:
        """Decode `steps` tokens of each stream; what a step took and where its picks were read."""
        from vllm import SamplingParams

        asked = [{"prompt_token_ids": [5 + s, 6, 7]} for s in range(streams)]

        def generate(tokens: int) -> float:
            start = time.perf_counter()
            how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            self.llm.generate(asked, how, use_tqdm=False)
            return time.perf_counter() - start

        overhead = generate(1)
        before = self.ask("appliance_state")
        seconds = generate(steps + 1) - overhead
        ranks = []
        for one, two in zip(before, self.ask("appliance_state"), strict=True):
            picks = {k: two["picks"][k] - one["picks"][k] for k in two["picks"]}
            read = two["host_bytes_read"] - one["host_bytes_read"]
            ranks.append({
                "cold": round(picks["host"] / max(1, sum(picks.values())), 5),
                "in_slots": round(picks["slot"] / max(1, sum(picks.values())), 5),
                "host_bytes_a_step": read // (steps + 1),
                "promotions": two["promotions"] - one["promotions"],
            })  # fmt: skip
        return {"streams": streams, "rows": streams * steps,
                "step_ms": round(seconds / steps * 1e3, 3), "ranks": ranks}  # fmt: skip


class Measurement:
    """Parts of the measurement of one engine. `found`: part -> streams -> the step that counts."""

    def __init__(self, a: Any, name: str, engine: Engine) -> None:
        self.a, self.name, self.engine = a, name, engine
        self.scale = 1 if a.device == "cuda" else 20
        self.found: dict[str, dict[int, float]] = {}

    def _said(self, part: str, topic: str, streams: int, rows: int, **about: Any) -> None:
        steps = max(2, rows // self.scale // streams)
        found = self.engine.run(streams, steps)
        self.found.setdefault(part, {})[streams] = found["step_ms"]
        if part.startswith("layers"):  # the cache's own idea of where they are is another
            for rank in found["ranks"]:
                rank["cold"] = rank["in_slots"] = None
        say(case=self.name, part=part, topic=topic, **about, **found)

    def still(self, topic: str) -> None:
        self.engine.ask("traffic_as_planned", STILL)
        self.engine.ask("traffic_route", topic)
        for streams in self.a.streams:
            self.engine.run(streams, 10)
            self._said(f"as planned, {topic}", topic, streams, 60 * streams)

    def layers(self) -> None:
        self.engine.ask("traffic_whole_layers")
        self.engine.ask("traffic_route", PLANNED)
        for streams in self.a.streams:
            self.engine.run(streams, 5)
            self._said("layers", PLANNED, streams, 40 * streams)

    def following(self, topic: str, windows: tuple[int, ...]) -> None:
        for streams in self.a.streams:
            self.engine.ask("traffic_as_planned", {})
            self.engine.ask("traffic_route", topic)
            seen = 0
            for rows in windows:
                self._said(f"following, {topic}", topic, streams, rows, after_rows=seen)
                seen += rows // self.scale
            if self.a.ranks > 1 and not self.a.ep:
                held = self.engine.ask("cache_held")
                say(case=self.name, ranks_hold_the_same=all(h == held[0] for h in held),
                    slots=len(held[0]))  # fmt: skip

    def ratios(self) -> None:
        def over(one: str, other: str) -> dict[int, float]:
            a, b = self.found.get(one, {}), self.found.get(other, {})
            return {s: round(a[s] / b[s], 3) for s in sorted(a.keys() & b.keys())}

        held_out, planned = f"as planned, {self.a.held_out}", f"as planned, {PLANNED}"
        likely = {
            p.streams: 1e3 / p.tokens_per_second.likely
            for p in self.engine.plan.predictions
            if p.tokens_per_second is not None
        }
        self.found["prediction"] = likely
        say(case=self.name,
            following_is_faster_than_as_planned=over(held_out, f"following, {self.a.held_out}"),
            as_planned_is_faster_than_whole_layers=over("layers", planned),
            following_over_as_planned_on_planned_traffic=over(f"following, {PLANNED}", planned),
            prediction_over_measured=over("prediction", planned))  # fmt: skip


def measure(a: Any, name: str, topics: Topics) -> None:
    made = make_plan(a.work / "model", CASES[name], heat_of(topics, a.held_out), a.device,
                     a.ranks, a.ep)  # fmt: skip
    engine = Engine(a, name, made, topics)
    rank = made.ranks[0]
    cold = made.forecast and made.forecast.cold and made.forecast.cold.model_dump(mode="json")
    predicted = [p.model_dump(mode="json") for p in made.predictions if p.streams in (1, 4, 6)]
    say(case=name, load_s=engine.load_s, predicted=predicted, cold=cold,
        gib={home: round(rank.total_bytes(home) / 2**30, 2) for home in ("device", "host")},
        host_experts=[sum(len(p.host_experts) for p in r.layers) for r in made.ranks],
    )  # fmt: skip
    run = Measurement(a, name, engine)
    for part in a.parts:
        if part == "held-out":
            run.still(a.held_out)
            run.following(a.held_out, (500, 500, 1000, 500))
        elif part == "steady":
            run.still(PLANNED)
        elif part == "layers":
            run.still(PLANNED)
            run.layers()
        else:
            run.following(PLANNED, (600, 300))
        run.ratios()
    leave()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--counts", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", default="legal")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=["slots-96"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:3]))
    parser.add_argument("--streams", type=int, nargs="+", default=[6, 4, 1], help="in this order")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ep", action="store_true", help="expert parallel over the ranks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--small", action="store_true", help="three small layers")
    parser.add_argument("--limit", type=float, default=380.0, help="seconds for a case")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--beside", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help="only make the checkpoint")
    a = parser.parse_args()
    spec = model_spec(a.small, a.layers)
    a.work.mkdir(parents=True, exist_ok=True)
    make_model(a.work / "model", spec)
    if a.make:
        return 0
    if a.case:
        measure(a, a.case, traffic(a.counts, spec.layers, a.held_out))
    say(predicted={
        "96 slots, held-out topic after 2,000 rows": "at most 4.0 % of picks cold; 64 slots 4.8 %",
        "following over as planned": "1.5, 2.0, 2.2 times faster at 1, 4, 6 streams",
        "as planned over whole layers": "2.2, 2.8, 2.8 times faster on a planned topic",
        "following on planned traffic": "within 3 % of as planned: the plan keeps its promise, and "
        "is left alone",
        "promotions": "none lost, at most 2 % of decode once settled",
    })  # fmt: skip
    return run_cases(a.only, a.work, a.limit)


if __name__ == "__main__":
    sys.exit(main())
