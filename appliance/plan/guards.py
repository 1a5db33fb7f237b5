"""Settings that look right and are not: findings about a plan and the engine's arguments.

Each was hit by operators (FACTS section 5, ENGINE.md). `arguments` are the engine's own, by flag
name without dashes; what is not given is the engine's default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from appliance.plan.budget import GIB, ON_HOST, TABLES
from appliance.plan.model import Plan
from appliance.plan.room import reserved_bytes
from preflight.checks.check import FAIL, WARN, Severity
from preflight.host import Host
from preflight.report import Finding

Arguments = Mapping[str, object]


class Seen(NamedTuple):
    """What is wrong, with its numbers; severity and fix where they are not the row's own."""

    text: str
    severity: Severity | None = None
    fix: str | None = None


class Guard(NamedTuple):
    """One row: a stable id, the rule, and the way out."""

    id: str
    severity: Severity
    run: Callable[[Plan, Host, Arguments], Iterator[Seen]]
    threshold: str
    source: str
    fix: str


def guard(plan: Plan, host: Host, arguments: Arguments | None = None) -> tuple[Finding, ...]:
    """What would go wrong if the engine were started like this, in the order of GUARDS."""
    given = arguments or {}
    return tuple(
        Finding(
            check=row.id,
            area="plan",
            severity=seen.severity or row.severity,
            saw=seen.text,
            threshold=row.threshold,
            source=row.source,
            fix=seen.fix or row.fix,
        )
        for row in GUARDS
        for seen in row.run(plan, host, given)
    )


def _kv_block(plan: Plan, host: Host, given: Arguments) -> Iterator[Seen]:
    on_sm120 = any((rank.compute_capability or "").startswith("12.") for rank in plan.ranks)
    if not (on_sm120 and plan.model.family.startswith("deepseek_v4")):
        return
    block = given.get("block-size", plan.serving.kv_block_tokens)
    if block == 128:
        yield Seen(
            "KV blocks of 128 tokens start, and are unproved on this card with this model",
            WARN,
            "trust it once the known prompt gives its known tokens",
        )
    else:
        yield Seen(
            f"KV blocks of {block} tokens: attention and indexer of this model agree on "
            "128 alone on sm_120"
        )


def _graph_sizes(plan: Plan, host: Host, given: Arguments) -> Iterator[Seen]:
    sizes, streams = given.get("cudagraph-capture-sizes"), given.get("max-num-seqs")
    rows = streams if isinstance(streams, int) else plan.serving.streams
    draft = given.get("num-speculative-tokens", 0)
    rows *= 1 + (draft if isinstance(draft, int) else 0)
    if isinstance(sizes, list) and max(sizes, default=0) < rows:
        yield Seen(
            f"the largest captured graph takes {max(sizes, default=0)} rows and a step of "
            f"{rows} can come: it would run without a graph",
            fix=f"capture up to {rows}",
        )


def _short_chunk(plan: Plan, host: Host, given: Arguments) -> Iterator[Seen]:
    chunk = plan.serving.prefill_chunk_tokens
    enough = None if plan.forecast is None else plan.forecast.break_even_chunk_tokens
    if enough is not None and chunk < enough:
        yield Seen(
            f"a prefill chunk of {chunk:,} tokens waits for the link: host experts cross "
            f"once a chunk, and arithmetic covers that from about {enough:,} tokens"
        )


def _draft_cache(plan: Plan, host: Host, given: Arguments) -> Iterator[Seen]:
    if given.get("num-speculative-tokens") and given.get("enable-prefix-caching", True):
        yield Seen("prefix caching beside a draft model can be silently dead")


def _native_offload(plan: Plan, host: Host, given: Arguments) -> Iterator[Seen]:
    amount = given.get("cpu-offload-gb", 0)
    if isinstance(amount, int | float) and amount > 0:
        yield Seen(
            f"--cpu-offload-gb {amount:g} moves whole parameters in model order and skips "
            "this plugin's experts: it would spend itself on attention and norms"
        )
    backend = given.get("offload-backend")
    if backend not in (None, "auto"):
        yield Seen(f"--offload-backend {backend} copies whole layers every step")


def _tight_memory(plan: Plan, host: Host, given: Arguments) -> Iterator[Seen]:
    need = sum(rank.total_bytes("host") for rank in plan.ranks)
    all_of_it, experts = (frozenset({ON_HOST, TABLES}), frozenset({ON_HOST}))
    need -= reserved_bytes(host, plan.ranks, all_of_it) or reserved_bytes(host, plan.ranks, experts)
    limits = {"free on this host": host.memory_free_bytes,
              "allowed by the control group": host.limits.cgroup_memory_max_bytes}  # fmt: skip
    for what, limit in limits.items():
        if limit is not None and limit > 0 and need > 0.9 * limit:
            yield Seen(
                f"the plan takes {need / GIB:.1f} GiB of host memory, {need / limit:.0%} of "
                f"the {limit / GIB:.1f} GiB {what}"
            )
    for node in host.numa_nodes:
        mine = sum(
            line.size_bytes
            for rank in plan.ranks
            if rank.numa_node == node.index
            for line in rank.ledger
            if line.part == ON_HOST
        )
        free = node.memory_free_bytes
        on_it = [rank for rank in plan.ranks if rank.numa_node == node.index]
        if reserved_bytes(host, on_it, experts):
            continue
        if free and mine > 0.9 * free:
            yield Seen(
                f"experts take {mine / GIB:.1f} GiB, {mine / free:.0%} of what memory node "
                f"{node.index} has free"
            )


GUARDS = (
    Guard(
        "kv-block-size",
        FAIL,
        _kv_block,
        "128 on sm_120",
        "vLLM 0.33 source",
        "leave --block-size to the plan",
    ),
    Guard(
        "graph-capture-sizes",
        FAIL,
        _graph_sizes,
        "max-num-seqs x (1 + draft tokens)",
        "FACTS section 5, 13",
        "capture larger sizes",
    ),
    Guard(
        "prefill-chunk-covers-link",
        WARN,
        _short_chunk,
        "arithmetic as long as the link",
        "FACTS section 3",
        "take a longer chunk, or more experts on the device",
    ),
    Guard(
        "prefix-cache-with-draft",
        WARN,
        _draft_cache,
        "no draft model",
        "FACTS section 5, 14",
        "send one prompt twice and see vllm:prefix_cache_hits rise",
    ),
    Guard(
        "native-offload",
        FAIL,
        _native_offload,
        "not given",
        "vLLM 0.33 source",
        "take it out: the plan already says which experts live on the host",
    ),
    Guard(
        "host-memory-margin",
        WARN,
        _tight_memory,
        "90 %",
        "FACTS section 5, 1",
        "free memory, or plan fewer experts on the host",
    ),
)
