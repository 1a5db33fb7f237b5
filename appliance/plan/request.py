"""What the operator asks a plan for. Every impossible value is refused here, in one sentence."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from appliance.errors import UsageError

SLOWEST_LINK, FASTEST_LINK = 1e6, 1e13  # bytes a second: beyond, somebody meant another unit
_POSITIVE = ("tensor_parallel", "streams", "conversations", "context_tokens",
             "prefill_chunk_tokens", "device_capacity_bytes")  # fmt: skip
_NOT_NEGATIVE = ("cache_slots", "host_reserve_bytes", "reserve_bytes")


@dataclass(frozen=True, slots=True)
class Policy:
    """The request. None means: the planner chooses, and a note of the plan says what it chose.

    device                 cuda, cpu, or None: cuda where the host has a GPU
    tensor_parallel        ranks; None: every GPU of the host, one on the CPU
    expert_parallel        whole experts per rank instead of a slice of every expert
    streams                requests that decode at once
    conversations          contexts the KV cache holds, at least `streams`; None: twice as many,
                           so that for each that decodes one waits, kept, for its next turn; but
                           none waits where that takes more than a quarter of the device
    context_tokens         longest conversation; None: the model's own limit, at most 262,144, and
                           halved until those that decode fit in a quarter of the device
    kv_dtype               auto, or fp8: one byte a value (vLLM's --kv-cache-dtype)
    host_share             share of the experts to put on the host: 0 all resident, 1 none.
                           None: as many resident as fit (half of them on a machine without a GPU)
    cache_slots            spare device slots a layer for experts that become hot. None: a third
                           of what the device holds of a layer, all of it where no counts are
                           known, and no more than host memory has room for copies (slots.py)
    device_capacity_bytes  use this much of each device instead of what it has
    reserve_bytes          left free on each device; None: 8 % on a GPU, nothing on the CPU
    host_reserve_bytes     host memory left for the engine process of one rank and the system
    link_bytes_per_second  measured host reads, one value per rank; None: from the link's kind
    """

    device: Literal["cuda", "cpu"] | None = None
    tensor_parallel: int | None = None
    expert_parallel: bool = False
    streams: int = 6
    conversations: int | None = None
    context_tokens: int | None = None
    kv_dtype: Literal["auto", "fp8"] = "auto"
    prefill_chunk_tokens: int = 8192
    draft: bool = False
    host_share: float | None = None
    cache_slots: int | None = None
    device_capacity_bytes: int | None = None
    reserve_bytes: int | None = None
    host_reserve_bytes: int | None = None
    link_bytes_per_second: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}: it must be at least 1")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{name} is {value}: it cannot be negative")
        if self.host_share is not None and not 0 <= self.host_share <= 1:
            raise UsageError(
                f"host_share is {self.host_share}: it is a share of the experts, from 0 to 1"
            )
        if self.kv_dtype not in ("auto", "fp8"):
            raise UsageError(f"kv_dtype is {self.kv_dtype!r}: auto and fp8 are known")
        for rate in self.link_bytes_per_second or ():
            if not SLOWEST_LINK <= rate <= FASTEST_LINK:  # nor is NaN
                raise UsageError(
                    f"a link of {rate} bytes per second is not a link",
                    fix="give bytes per second: 50e9 for 50 GB/s",
                )
        if self.conversations is not None and self.conversations < self.streams:
            from preflight.counted import counted  # not loaded for every command's options

            raise UsageError(
                f"{counted(self.conversations, 'conversation')} cannot feed "
                f"{counted(self.streams, 'stream')}",
                fix=f"ask for at least {counted(self.streams, 'conversation')} or fewer streams",
            )

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
