"""Plan -> ServeSpec: the exact engine command, its environment and its files. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from appliance.errors import UsageError
from appliance.plan.model import Plan
from appliance.serve.state import Files

if TYPE_CHECKING:
    from appliance.serve.asked import Asked

# Inherited variables that would open or close doors behind the gateway's back.
REMOVED_VARIABLES = ("VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "VLLM_DEBUG_LOG_API_SERVER_RESPONSE",
                     "VLLM_ALLOW_RUNTIME_LORA_UPDATING")  # fmt: skip

# A start is imports and process launches, then one pass over the weights, then pinning.
ENGINE_START_SECONDS = 40.0  # the CPU engine over HTTP takes 30 to 60 s to ready (ENGINE.md)
READ_BYTES_PER_SECOND = 1.0e9
PIN_SECONDS_PER_GIB = 0.05  # huge pages, touched and registered (FACTS section 3)
SLOWEST_READ_BYTES_PER_SECOND = 100e6
SLOWEST_START_SECONDS = 900.0  # a hang only: a death is seen at once

# Known answers come from float32. A 16-bit type keeps 8 to 11 bits of a logit: leads smaller than
# this say nothing there. Derived from the types, not yet measured on a GPU.
CLEAR_LEAD = {"cpu": 0.0, "cuda": 0.25}


# vLLM's CPU op rotary_embedding is wrong for the [tokens, heads, dim] slices of latent attention
# (DeepSeek): it rotates the first `tokens` rows and leaves the others. Its plain form is right.
CPU_COMPILATION = {"custom_ops": ["all", "-rotary_embedding"]}


# Our name among vLLM's plugins. Of all that are installed only this one is loaded.
OURS = "appliance"

# What can be captured in a CUDA graph (expert_kernels.launch: MAX_TOKENS and MAX_PICKS).
MOST_ROWS = 64
MOST_PICKS = 1024
EVERY_SIZE = 16  # streams


@dataclass(frozen=True)
class Wishes:
    """What the operator decides about serving and the plan does not say."""

    engine_python: str
    host: str
    port: int
    served_name: str | None = None
    drain_seconds: float = 60.0
    start_limit_seconds: float | None = None
    max_body_bytes: int = 64 << 20
    max_header_bytes: int = 32 << 10
    exl3_owner: str = OURS
    arena: Path | None = None  # a folder that `weights repack` wrote: host experts stay in it
    tls: Literal["off", "generated", "own"] = "off"
    certificate: Path | None = None
    certificate_key: Path | None = None


@dataclass(frozen=True)
class ServeSpec:
    """All there is to know to start the engine; `environment` is added to the inherited one."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    files: Files
    host: str
    port: int
    model: Path
    served_name: str
    plan_path: Path
    plan_digest: str
    learned: Path | None  # what the slots learned, kept from one run to the next
    load_seconds: float
    start_limit_seconds: float
    drain_seconds: float
    clear_lead: float
    certificate: Path | None = None
    certificate_key: Path | None = None
    asked: Asked | None = None  # kept once it serves

    def command(self) -> str:
        """The command as a shell would take it. Holds no secret: keys are named by their files."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        removed = [f"-u {name}" for name in REMOVED_VARIABLES]
        return " ".join(["env", *removed, *variables, shlex.join(self.argv)])


def spec(plan: Plan, model: Path, plan_path: Path, wishes: Wishes, files: Files) -> ServeSpec:
    """The engine of this plan. Paths come out absolute.

    Raises UsageError on a mixed plan, and where another plugin is to own the method exl3.
    """
    if wishes.exl3_owner != OURS:
        raise UsageError(
            f"APPLIANCE_EXL3_OWNER is {wishes.exl3_owner}, a plugin that reads no plan: this one"
            f" would be ignored",
            fix=f"APPLIANCE_EXL3_OWNER={OURS}, or start `vllm serve` without the appliance",
        )
    devices = {rank.device for rank in plan.ranks}
    if len(devices) != 1:
        raise UsageError(f"the plan mixes devices over its ranks: {', '.join(sorted(devices))}")
    model, plan_path = model.absolute(), plan_path.absolute()
    name = wishes.served_name or model.name
    load_seconds = predicted_load_seconds(plan)
    certificate, key = wishes.certificate, wishes.certificate_key
    if wishes.tls == "generated":
        certificate, key = files.certificate, files.certificate_key
    learned = None if plan.cache is None else files.learned(plan.made_from.checkpoint)
    return ServeSpec(
        argv=(
            *_argv(plan, wishes, model=model, plan_path=plan_path, name=name, learned=learned),
            *(() if certificate is None else ("--ssl-certfile", str(certificate))),
            *(() if key is None else ("--ssl-keyfile", str(key))),
        ),
        environment=_environment(plan, wishes, files),
        files=files,
        host=wishes.host,
        port=wishes.port,
        model=model,
        served_name=name,
        plan_path=plan_path,
        plan_digest=plan.digest,
        learned=learned,
        load_seconds=load_seconds,
        start_limit_seconds=wishes.start_limit_seconds or _start_limit_seconds(plan),
        drain_seconds=wishes.drain_seconds,
        clear_lead=CLEAR_LEAD[plan.ranks[0].device],
        certificate=certificate,
        certificate_key=key,
    )


def _argv(
    plan: Plan, wishes: Wishes, *, model: Path, plan_path: Path, name: str, learned: Path | None
) -> tuple[str, ...]:
    ours: dict[str, dict[str, str]] = {
        "appliance": {"plan": str(plan_path), "checkpoint": str(model)}
    }
    if learned is not None:
        ours["appliance"]["learned"] = str(learned)
    if wishes.arena is not None:
        ours["appliance"]["arena"] = str(wishes.arena.absolute())
    argv = [
        wishes.engine_python,
        # Without -P a folder of the working directory could shadow a package.
        *("-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--host", wishes.host, "--port", str(wishes.port)),
        *("--served-model-name", name),
        *("--max-model-len", str(plan.serving.context_tokens)),
        *("--max-num-seqs", str(plan.serving.streams)),
        *("--max-num-batched-tokens", str(_batched_tokens(plan))),
        *("--kv-cache-memory-bytes", str(plan.serving.kv_cache_bytes)),
        *("--kv-cache-dtype", "fp8") * (plan.serving.kv_cache_dtype == "fp8"),
        *("--tensor-parallel-size", str(plan.tensor_parallel)),
        *("--enable-expert-parallel",) * plan.expert_parallel,
        *_device_arguments(plan),
        *("--additional-config", json.dumps(ours)),
        *("--worker-cls", "appliance.engine.worker.Worker"),
        *("--middleware", "appliance.gateway.Gateway"),
        # One API process: the gateway's admission and its count of requests live in it.
        *("--api-server-count", "1"),
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
        *("--shutdown-timeout", str(round(wishes.drain_seconds))),
    ]
    if plan.serving.kv_block_tokens is not None:
        argv += ["--block-size", str(plan.serving.kv_block_tokens)]
    return tuple(argv)


def _batched_tokens(plan: Plan) -> int:
    # The engine refuses fewer tokens in a step than it may have streams.
    return max(plan.serving.prefill_chunk_tokens, plan.serving.streams)


def _device_arguments(plan: Plan) -> tuple[str, ...]:
    if plan.ranks[0].device == "cpu":
        # The reference ops are float32 and not compiled.
        how = json.dumps(CPU_COMPILATION)
        return ("--dtype", "float32", "--enforce-eager", "--compilation-config", how)
    graphs = {
        "mode": 0,  # no torch.compile: our op is opaque to it, and it takes minutes
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": capture_sizes(plan.serving.streams, plan.model.top_k),
    }
    # With the size of the KV cache given, vLLM only asks with it whether as much memory is free.
    used = max(rank.total_bytes("device") / rank.device_capacity_bytes for rank in plan.ranks)
    share = f"{min(1.0, max(0.001, used)):.3f}"
    return ("--gpu-memory-utilization", share, "--compilation-config", json.dumps(graphs))


def capture_sizes(streams: int, top_k: int, draft_tokens: int = 0) -> list[int]:
    """Rows of the decode steps that are captured: of every number of streams up to 16, then of each
    eighth, and of all. A row that only fills up a graph reads experts like any other.

    A stream has 1 + draft_tokens rows; the launcher starts no draft model yet. Steps of more rows
    than the kernels read in place (64, and 1,024 picks) run as they come, uncaptured: to the
    kernels they are prefill, in which the host takes part.
    """
    rows = 1 + draft_tokens
    most = min(MOST_ROWS, MOST_PICKS // top_k)
    counts = {*range(1, min(streams, EVERY_SIZE) + 1), *range(EVERY_SIZE, streams, 8), streams}
    sizes = sorted(n * rows for n in counts if n <= streams and n * rows <= most)
    return sizes or [1]


def _environment(plan: Plan, wishes: Wishes, files: Files) -> dict[str, str]:
    environment = {
        "APPLIANCE_GATEWAY_KEYS": str(files.keys),
        "APPLIANCE_GATEWAY_CONTROL_KEY": str(files.control_key),
        "APPLIANCE_GATEWAY_MAX_BODY_BYTES": str(wishes.max_body_bytes),
        "APPLIANCE_GATEWAY_MAX_HEADER_BYTES": str(wishes.max_header_bytes),
        # Ranks are on this host: nothing of theirs is to listen anywhere else.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": OURS,
    }
    cards = [rank.gpu for rank in plan.ranks if rank.gpu is not None]
    if len(cards) == len(plan.ranks):
        # Rank r gets the plan's card r, whatever order the driver counts them in.
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    if plan.ranks[0].device == "cpu":
        environment["VLLM_TARGET_DEVICE"] = "cpu"
        if len(plan.ranks) > 1:
            # Left alone, vLLM wants a NUMA node for each rank and does not start without; unbound
            # ranks of many threads each would spin against one another on the same cores.
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return environment


def predicted_load_seconds(plan: Plan) -> float:
    """From start to ready: what the plan says, so that nobody reads two numbers of one plan.

    A plan without a forecast: imports and processes, one pass over the weights, pinning.
    """
    if plan.forecast is not None and plan.forecast.load_seconds is not None:
        return plan.forecast.load_seconds.likely
    host_gib = sum(rank.total_bytes("host") for rank in plan.ranks) / (1 << 30)
    reading = plan.model.size_bytes / READ_BYTES_PER_SECOND
    return round(ENGINE_START_SECONDS + reading + host_gib * PIN_SECONDS_PER_GIB, 1)


def _start_limit_seconds(plan: Plan) -> float:
    return SLOWEST_START_SECONDS + plan.model.size_bytes / SLOWEST_READ_BYTES_PER_SECOND
