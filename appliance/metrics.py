"""Prometheus text from what is known of machine, plan and engine. COLLECTORS is the table.

Labels take values from the plan, the host and our own tables only: their number is bounded by
ranks, nodes, phases and checks, never by requests. Unknown facts are left out, not written as 0.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from appliance.plan.model import Home, Plan
from preflight import Host, Report

PREFIX = "moe_appliance_"
# vLLM's own families that we pass on; percentiles come from these histograms.
PASSED_ON = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:iteration_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
)
SUFFIXES = ("", "_bucket", "_sum", "_count", "_created")
_FAMILY = re.compile(r"^(?:# (?:HELP|TYPE) )?([a-zA-Z_:][a-zA-Z0-9_:]*)")
HOMES: tuple[Home, ...] = ("device", "host")
PLACES = ("device", "slot", "host")  # where a pick was read, as the engine's counters say it
LAYER_GROUPS = 8


@dataclass(frozen=True)
class Serving:
    """The appliance's phase, out of all there are; times in seconds, `since` from 1970."""

    phase: str
    phases: tuple[str, ...]
    since: float | None = None
    expected_load_seconds: float | None = None
    ready_after_seconds: float | None = None


@dataclass(frozen=True)
class Facts:
    """All a collector may look at. None: not known now."""

    host: Host | None = None
    report: Report | None = None
    plan: Plan | None = None
    serving: Serving | None = None
    engine: Any | None = None  # GET /appliance/state
    exposition: str = ""
    hung: bool = False
    restarts: int = 0
    upgrade: Any | None = None  # the upgrade's record: step, outcome
    release: str | None = None
    image_digest: str | None = None


@dataclass
class Metric:
    """One family. `samples`: labels and value."""

    name: str
    help: str
    kind: Literal["gauge", "counter"] = "gauge"
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: object) -> Metric:
        if value is not None:
            self.samples.append(({k: str(v) for k, v in labels.items()}, value))
        return self

    def lines(self) -> Iterator[str]:
        name = PREFIX + self.name
        yield f"# HELP {name} {self.help}"
        yield f"# TYPE {name} {self.kind}"
        for labels, value in self.samples:
            inner = ",".join(f'{k}="{_escaped(v)}"' for k, v in labels.items())
            yield f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}"


def of_machine(facts: Facts) -> Iterator[Metric]:
    if facts.host is None:
        return
    yield Metric("host_memory_bytes", "Memory of the host.").add(facts.host.memory_total_bytes)
    yield Metric("host_memory_available_bytes", "Memory available at the start.").add(
        facts.host.memory_available_bytes
    )
    gpus = facts.host.gpus
    yield Metric("host_gpus", "GPUs seen; absent where they could not be counted.").add(
        None if gpus is None else len(gpus)
    )


def of_findings(facts: Facts) -> Iterator[Metric]:
    if facts.report is None:
        return
    metric = Metric("preflight_findings", "Findings of the last preflight, by severity.")
    for severity in ("fail", "warn", "unknown"):
        metric.add(sum(f.severity == severity for f in facts.report.findings), severity=severity)
    yield metric
    bad = Metric("preflight_finding", "1 for each check that failed or warned.")
    for finding in facts.report.failures + facts.report.warnings:
        bad.add(1, check=finding.check, severity=finding.severity)
    yield bad


def of_plan(facts: Facts) -> Iterator[Metric]:
    if facts.plan is None:
        return
    experts = Metric("plan_experts", "Experts by home, per rank.")
    size = Metric("plan_bytes", "Planned bytes by home, per rank.")
    slots = Metric("plan_cache_slots", "Spare cache slots over all layers, per rank.")
    for rank in facts.plan.ranks:
        experts.add(
            sum(len(la.device_experts) for la in rank.layers), rank=rank.rank, home="device"
        )
        experts.add(sum(len(la.host_experts) for la in rank.layers), rank=rank.rank, home="host")
        slots.add(sum(layer.cache_slots for layer in rank.layers), rank=rank.rank)
        for home in HOMES:
            size.add(rank.total_bytes(home), rank=rank.rank, home=home)
    cold = Metric("plan_cold_share", "Predicted share of picks that are on the host.")
    for prediction in facts.plan.predictions:
        cold.add(prediction.cold_share, streams=prediction.streams)
    yield from (experts, size, slots, cold)


def of_engine(facts: Facts) -> Iterator[Metric]:
    if facts.engine is None:
        return
    picks = Metric("picks_total", "Routed picks by the home of the expert.", "counter")
    read = Metric("host_read_bytes_total", "Bytes of experts read from host memory.", "counter")
    held = Metric("placed_bytes", "Bytes of experts in each home, as the engine holds them.")
    for rank in facts.engine["ranks"]:
        for home, count in rank["picks"].items():
            picks.add(count, rank=rank["rank"], home=home)
        read.add(rank["host_bytes_read"], rank=rank["rank"])
        for home, here in rank["homes"].items():
            held.add(here["bytes"], rank=rank["rank"], home=home)
    yield from (picks, read, held)


def of_layers(facts: Facts) -> Iterator[Metric]:
    """By groups of neighbouring layers: their number is bounded whatever the model."""
    if facts.engine is None:
        return
    picks = Metric("layer_picks_total", "Routed picks by layers and where they were read: on the"
                   " device, in a cache slot (a hit), on the host (cold).", "counter")  # fmt: skip
    read = Metric("layer_host_read_bytes_total", "Bytes that crossed from the host, by layers.",
                  "counter")  # fmt: skip
    promotions = Metric("promotions_total", "Experts that moved into a cache slot.", "counter")
    for rank in facts.engine["ranks"]:
        for name, rows in groups(rank["layers"]):
            for place in PLACES:
                picks.add(sum(row[place] for row in rows), rank=rank["rank"], layers=name,
                          place=place)  # fmt: skip
            read.add(sum(row["host_bytes_read"] for row in rows), rank=rank["rank"], layers=name)
        promotions.add(rank["promotions"], rank=rank["rank"])
    yield from (picks, read, promotions)


def groups(layers: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """At most LAYER_GROUPS of (name such as "0-4", the rows of those layers)."""
    numbers = sorted(map(int, layers))
    size = -(-len(numbers) // LAYER_GROUPS)
    for start in range(0, len(numbers), max(size, 1)):
        part = numbers[start : start + size]
        yield f"{part[0]}-{part[-1]}", [layers[str(number)] for number in part]


def of_state(facts: Facts) -> Iterator[Metric]:
    phase = Metric("phase", "1 for the phase the appliance is in.")
    yield Metric("engine_hung", "1 while the engine makes no progress.").add(int(facts.hung))
    yield Metric("engine_restarts_total", "Restarts of a hung engine.", "counter").add(
        facts.restarts
    )
    yield Metric("info", "What this is.").add(
        1, release=facts.release or "", image_digest=facts.image_digest or ""
    )
    if facts.serving is None:
        return
    for name in facts.serving.phases:
        phase.add(int(name == facts.serving.phase), phase=name)
    yield phase
    yield Metric("phase_since_seconds", "When the phase began, seconds since 1970.").add(
        facts.serving.since
    )
    yield Metric("load_expected_seconds", "Predicted time from start to ready.").add(
        facts.serving.expected_load_seconds
    )
    yield Metric("load_seconds", "Time from start to ready, once ready.").add(
        facts.serving.ready_after_seconds
    )


def of_upgrade(facts: Facts) -> Iterator[Metric]:
    if facts.upgrade is None:
        return
    yield Metric("upgrade_step", "1 for the step the upgrade is at.").add(
        1, step=facts.upgrade["step"], outcome=facts.upgrade["outcome"]
    )


COLLECTORS: dict[str, Callable[[Facts], Iterator[Metric]]] = {
    "machine": of_machine,
    "findings": of_findings,
    "plan": of_plan,
    "engine": of_engine,
    "layers": of_layers,
    "state": of_state,
    "upgrade": of_upgrade,
}


def page(facts: Facts) -> str:
    """The text of /metrics: every collector, its duration and success, then vLLM's own."""
    lines: list[str] = []
    duration = Metric("collector_seconds", "How long a collector took.")
    success = Metric("collector_success", "0 where a collector failed; its metrics are absent.")
    for name, collect in COLLECTORS.items():
        started = time.monotonic()
        found: list[str] | None = None
        # One bad answer must not hide the other metrics; it shows as success 0.
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            found = [line for metric in collect(facts) for line in metric.lines()]
        duration.add(round(time.monotonic() - started, 6), collector=name)
        success.add(int(found is not None), collector=name)
        lines += found or []
    lines += [*duration.lines(), *success.lines(), *passed_on(facts.exposition)]
    return "\n".join(lines) + "\n"


def passed_on(exposition: str) -> Iterable[str]:
    """The lines of vLLM's exposition whose family is in PASSED_ON."""
    wanted = {family + suffix for family in PASSED_ON for suffix in SUFFIXES}
    for line in exposition.splitlines():
        match = _FAMILY.match(line)
        if match and match[1] in wanted:
            yield line


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
