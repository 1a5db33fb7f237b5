"""How much of the device is KV cache, and how long a conversation may get.

The contexts that decode must fit; as many again wait, kept, for their next turn, as long as all of
it takes no more than a quarter of the device and half of what other parts leave. The rest goes to
experts. Since the cache grows by less than the device does, more memory never leaves them less.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.errors import UsageError
from appliance.plan.kv import DEFAULT_CONTEXT_LIMIT, KvCost, kv_cache_bytes
from appliance.plan.request import Policy

OF_DEVICE, OF_REST = 4, 2  # at most one part in so many
SMALLEST_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class KvRoom:
    """The longest conversation, the bytes of the cache on each rank, and what to say about it."""

    context_tokens: int
    kv_bytes: int
    notes: tuple[str, ...] = ()


def choose_context(
    policy: Policy, cost: KvCost, limit: int | None, capacity_bytes: int, rest_bytes: int
) -> KvRoom:
    """From what was asked for, the model's own limit, the smallest device, and what is left of it
    for KV cache and experts.

    Raises UsageError for a context the model was not made for.
    """
    asked = policy.context_tokens
    if limit is not None and asked is not None and asked > limit:
        raise UsageError(
            f"a context of {asked:,} tokens is asked for and the model was made for {limit:,}",
            fix=f"ask for at most {limit}",
        )
    bound = min(capacity_bytes // OF_DEVICE, rest_bytes // OF_REST)
    longest = asked or min(limit or DEFAULT_CONTEXT_LIMIT, DEFAULT_CONTEXT_LIMIT)
    sure = policy.conversations or policy.streams
    wanted = policy.conversations or 2 * policy.streams
    context = longest
    while (
        asked is None
        and context > SMALLEST_CONTEXT
        and (kv_cache_bytes(cost, sure * context) > bound)
    ):
        context //= 2
    least = kv_cache_bytes(cost, sure * context)
    most = kv_cache_bytes(cost, wanted * longest)
    size = max(least, min(most, bound))
    notes = []
    if context < longest:
        notes.append(
            f"a context of {context:,} tokens was chosen: {sure} of {longest:,} would leave "
            "too little of the device for experts"
        )
    elif size < most:
        kept = size / cost.bytes_per_token / context
        notes.append(
            f"the KV cache holds {kept:.1f} contexts instead of {wanted}, to leave room for "
            "experts: a conversation that waits may have to be read again"
        )
    return KvRoom(context, size, tuple(notes))
