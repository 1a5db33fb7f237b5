"""appliance size: would it fit, how fast, and what would a change buy; no machine needed.

Everything is planned by the planner itself on a host put together from the table of hardware.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from appliance.checkpoint.model import Checkpoint, ExpertShape, MoeLayer
from appliance.checkpoint.support import require_exl3
from appliance.errors import ApplianceError, UsageError
from appliance.plan.budget import GIB
from appliance.plan.hardware import gpu_model, host_model
from appliance.plan.model import Plan
from appliance.plan.outlook import Range, StreamPrediction
from appliance.plan.planner import plan
from appliance.plan.request import Policy
from appliance.plan.routing import Heat
from preflight.counted import counted
from preflight.host import Gpu, Host, NumaNode

# FACTS section 1: a person's agent is decoding 7.1 % of the time, and at most 1 % of the time may
# more of them be active than there are streams.
ACTIVE_SHARE, OVERFLOW = 0.071, 0.01
TARGET_TOKENS_PER_SECOND, HEADROOM = 40.0, 0.10
SYSTEM_BYTES = 4 * GIB
_ASKED = {"count": "--count", "host_bytes": "--host-ram", "users": "--users",
          "context_tokens": "--context"}  # fmt: skip
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """A machine and a load that nobody has to own yet. `users` decode at once."""

    gpu: str
    count: int
    host_bytes: int
    users: int
    context_tokens: int | None = None
    host: str = "epyc-1p"
    expert_parallel: bool = False
    target: float = TARGET_TOKENS_PER_SECOND
    kv_dtype: Literal["auto", "fp8"] = "auto"

    def __post_init__(self) -> None:
        for name, words in _ASKED.items():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{words} is {value}: it must be at least 1",
                                 fix=f"give {words} a number of 1 or more")  # fmt: skip
        if not (math.isfinite(self.target) and self.target > 0):
            raise UsageError(f"--target is {self.target}: nobody can ask for that many tokens a "
                             "second", fix="give a number above 0, such as 40")  # fmt: skip
        gpu_model(self.gpu)
        most = host_model(self.host).max_memory_bytes
        if self.host_bytes > most:
            raise UsageError(
                f"{self.host_bytes / GIB:,.0f} GiB of memory do not go into this kind of host "
                f"({self.host}: {most / GIB:,.0f} GiB)",
                fix="name another --host",
            )


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a machine that is there: so many at once, so fast each."""

    users: int = 6
    target: float = TARGET_TOKENS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Answer:
    """What the planner said: a plan, or why there is none; and whether it is fast enough."""

    ask: Ask | Load
    plan: Plan | None
    refusal: ApplianceError | None = None

    @property
    def step(self) -> StreamPrediction | None:
        """The prediction for the users asked for, or the next larger number."""
        steps = self.plan.predictions if self.plan else ()
        return next((s for s in steps if s.streams >= self.ask.users), None)

    @property
    def speed(self) -> Range | None:
        """Tokens a second of each user; None where nobody can say."""
        return self.step.tokens_per_second if self.step else None

    @property
    def fast_enough(self) -> bool | None:
        """None where nobody can say: no plan, an unknown card, or more users than are predicted."""
        speed = self.speed
        return None if speed is None else speed.likely * (1 - HEADROOM) >= self.ask.target

    @property
    def yes(self) -> bool:
        return self.plan is not None and self.fast_enough is True


def answer(checkpoint: Checkpoint, ask: Ask, heat: Heat | None = None) -> Answer:
    """Plan the model on the machine asked for.

    Raises UsageError and, for a model that no machine could serve, UnsupportedError.
    """
    require_exl3(checkpoint)
    policy = Policy(
        device="cuda",
        streams=ask.users,
        context_tokens=ask.context_tokens,
        expert_parallel=ask.expert_parallel,
        kv_dtype=ask.kv_dtype,
    )
    try:
        return Answer(ask, plan(made_up_host(ask), checkpoint, heat, policy))
    except UsageError:
        raise  # no machine would do
    except ApplianceError as error:
        return Answer(ask, None, error)


def answer_here(checkpoint: Checkpoint, host: Host, load: Load) -> Answer:
    """Plan the model on a machine that is there, measured rates and all."""
    try:
        return Answer(load, plan(host, checkpoint, None, Policy(streams=load.users)))
    except ApplianceError as error:
        return Answer(load, None, error)


def made_up_host(ask: Ask) -> Host:
    """A host of the table with the cards asked for, spread over its memory nodes."""
    card, box = gpu_model(ask.gpu), host_model(ask.host)
    nodes, free = box.numa_nodes, ask.host_bytes - min(SYSTEM_BYTES, ask.host_bytes)
    return Host(
        label=f"{ask.count} x {card.title} in {box.title}",
        memory_total_bytes=ask.host_bytes,
        memory_available_bytes=free,
        memory_free_bytes=free,
        numa_nodes=tuple(
            NumaNode(index=i, memory_total_bytes=ask.host_bytes // nodes,
                     memory_free_bytes=free // nodes)
            for i in range(nodes)
        ),
        gpus=tuple(
            Gpu(index=i, uuid=f"GPU-{i}", name=f"NVIDIA {card.title}",
                memory_total_bytes=card.memory_bytes, numa_node=i * nodes // ask.count,
                compute_capability=card.compute_capability,
                pcie_generation_max=min(card.pcie_generation, box.pcie_generation), pcie_width=16)
            for i in range(ask.count)
        ),
    )  # fmt: skip


def people(streams: int) -> int:
    """How many people so many streams carry: more of them are active in under 1 % of the time."""
    enough, too_many = streams, math.ceil((streams + 1) / ACTIVE_SHARE)
    while too_many - enough > 1:
        count = (enough + too_many) // 2
        if _more_active_than(streams, count) <= OVERFLOW:
            enough = count
        else:
            too_many = count
    return enough


def changes(
    checkpoint: Checkpoint, ask: Ask, heat: Heat | None = None
) -> Iterator[tuple[str, Checkpoint, Ask]]:
    """Single steps from what was asked, smallest first: in words, with what they plan on."""
    for more in _more_memory(ask.host_bytes, host_model(ask.host).max_memory_bytes):
        yield f"{more / GIB:,.0f} GiB of host memory", checkpoint, replace(ask, host_bytes=more)
    if ask.context_tokens is not None:
        for part in (2, 4, 8):
            shorter = ask.context_tokens // part
            if shorter >= 1024:
                yield f"a context of {shorter:,}", checkpoint, replace(ask, context_tokens=shorter)
    if (users := _users_that_fit(checkpoint, ask, heat)) is not None:
        yield f"{counted(users, 'user')} at once", checkpoint, replace(ask, users=users)
    if not ask.expert_parallel and ask.count > 1:
        yield "whole experts on each card", checkpoint, replace(ask, expert_parallel=True)
    for count in (ask.count + 1, 2 * ask.count, 4 * ask.count):
        yield f"{count} cards", checkpoint, replace(ask, count=count)
        yield (
            f"{count} cards, expert parallel",
            checkpoint,
            replace(ask, count=count, expert_parallel=True),
        )
    shapes = [p for layer in checkpoint.layers for p in layer.experts[0].projections]
    if any(p.bits > 2 for p in shapes):
        yield "a 2-bit package", with_bits(checkpoint, 2), ask


def _more_memory(now: int, most: int) -> list[int]:
    """Steps of 64 GiB near what there is, then doubled as long as a host of this kind takes it."""
    near = {-(-int(now * share) // (64 * GIB)) * 64 * GIB for share in (1.25, 1.5, 2, 3, 4, 8)}
    doubled = (max(near) << power for power in range(1, 32))
    return sorted({size for size in (*near, *doubled, most) if now < size <= most})


def _users_that_fit(checkpoint: Checkpoint, ask: Ask, heat: Heat | None) -> int | None:
    """The most users, fewer than asked for, that fit; where those asked for do fit, the most that
    are fast enough. None: not even one."""
    fits = answer(checkpoint, ask, heat).plan is not None

    def good(users: int) -> bool:
        found = answer(checkpoint, replace(ask, users=users), heat)
        return found.yes if fits else found.plan is not None

    enough, too_many = 0, ask.users
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        if good(middle):
            enough = middle
        else:
            too_many = middle
    return enough or None


def with_bits(checkpoint: Checkpoint, bits: float) -> Checkpoint:
    """The same model with its routed experts quantised to another K; everything else as it is."""
    layers = tuple(_layer_with_bits(layer, bits) for layer in checkpoint.layers)
    saved = sum(la.size_bytes for la in checkpoint.layers) - sum(la.size_bytes for la in layers)
    return replace(checkpoint, layers=layers, size_bytes=checkpoint.size_bytes - saved)


def bytes_from(text: str) -> int:
    """`256GiB`, `96 GB`, `1TiB`, `1024B` -> bytes. Raises UsageError, also where the unit is left
    out: `64` is meant as GiB by everybody and would be bytes."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-zA-Z]*)\s*", text)
    unit = _BYTES.get(found[2].upper()) if found else None
    if found is None or unit is None:
        bare = found is not None and not found[2]
        raise UsageError(f"{text!r} is {'a number without a unit' if bare else 'not a size'}",
                         fix=f"write it like {text.strip() if bare else 256}GiB")  # fmt: skip
    return int(float(found[1]) * unit)


def tokens_from(text: str) -> int:
    """`256K` -> 262,144; `1M` -> 1,048,576; `4096` -> 4,096. Raises UsageError."""
    found = re.fullmatch(r"\s*(\d{1,15})\s*([kKmM]?)\s*", text)
    if found is None:
        raise UsageError(f"{text!r} is not a number of tokens", fix="write it like 256K")
    return int(found[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[found[2].lower()]


def _layer_with_bits(layer: MoeLayer, bits: float) -> MoeLayer:
    shape = layer.experts[0]
    gate, up, down = (replace(p, bits=bits, stored_bytes=None) for p in shape.projections)
    return replace(layer, experts=(ExpertShape(gate, up, down),) * len(layer.experts))


def _more_active_than(streams: int, count: int) -> float:
    active, idle = math.log(ACTIVE_SHARE), math.log1p(-ACTIVE_SHARE)
    ways = math.lgamma(count + 1)
    few = math.fsum(
        math.exp(ways - math.lgamma(k + 1) - math.lgamma(count - k + 1)
                 + k * active + (count - k) * idle)
        for k in range(min(streams, count) + 1)
    )  # fmt: skip
    return 1 - few
