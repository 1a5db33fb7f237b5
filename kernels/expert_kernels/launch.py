"""From a problem's shape to how the kernels are launched. Pure: no torch, no device.

The numbers and their reasons are in csrc/decode.cuh: a unit is 128 columns of one expert, and
`split_*` cuts its k so that all multiprocessors have work whatever few experts are touched.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOKENS = 64  # rows that read weights in place; above, prefill
MAX_PICKS = 1024
MAX_EXPERTS = 1024
PREFILL_BATCH = 8  # host experts copied together: 106 MB of device memory a buffer at 13.3 MB each
PREFILL_ROWS = 4096  # rows of an expert multiplied at once: bounds the scratch
BLOCK = 128  # columns of a unit, and the rotation's block
# 16 blocks keep up with the link (1,571 us at 6 host experts, as 32 do) and leave the others to the
# device: 388 us at 24 touched and 1 on the host, 404 with 32. Once nothing else is left to do, 64
# share the last host expert: 276 us for one alone, 285 with all 264.
LINK_BLOCKS = 16
HOST_BLOCKS = 64
_SHARED_BYTES = {1: 65536, 2: 67584, 4: 67584, 8: 67584}  # csrc/decode.cuh, Layer::kSharedBytes
_ROUTING_BYTES = 14464 + 1024  # static shared memory of a block and what the system keeps of it
# Multiprocessor's shared memory by architecture; launch bounds allow at most two blocks each.
_SHARED_OF_ONE = {"sm_90": 233472, "sm_120": 102400}


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """`groups` of 8 rows a read of an expert; parts of k of the two products; thread blocks.

    Of the blocks `link_blocks` look for host experts first, `host_blocks` take any at all.
    """

    groups: int
    split_a: int
    split_b: int
    blocks: int
    link_blocks: int
    host_blocks: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes of each scratch buffer of a decode call, all in device memory."""

    rotated: int
    act: int
    partial_a: int
    partial_b: int
    y: int

    @property
    def total(self) -> int:
        return self.rotated + self.act + self.partial_a + self.partial_b + self.y


def decode(
    tokens: int,
    hidden: int,
    intermediate: int,
    multiprocessors: int,
    architecture: str = "sm_90",
    *,
    top_k: int,
) -> DecodeLaunch:
    """For 1..64 tokens. Depends on the shape alone, never on homes or routing: so do the bits."""
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"decode takes 1 to {MAX_TOKENS} tokens, not {tokens}: above is prefill")
    groups = next(g for g in (1, 2, 4, 8) if tokens <= 8 * g)
    shared = _SHARED_OF_ONE.get(architecture, _SHARED_OF_ONE["sm_120"])
    resident = max(1, min(2, shared // (_SHARED_BYTES[groups] + _ROUTING_BYTES)))
    # Few rows touch few experts: cut their k. The busiest multiprocessor decides, and one with a
    # single unit is as slow as with two. More rows touch more experts.
    split_a = 1
    if groups == 1:
        units = top_k * intermediate // BLOCK
        parts = [s for s in (1, 2, 4) if s == 1 or hidden // s >= 512]
        split_a = min(parts, key=lambda s: max(2, -(-units * s // multiprocessors)) * hidden // s)
    blocks = resident * multiprocessors
    host_blocks = min(HOST_BLOCKS, blocks)
    return DecodeLaunch(groups, split_a, 1, blocks, min(LINK_BLOCKS, blocks), host_blocks)


def workspace(launch: DecodeLaunch, picks: int, hidden: int, intermediate: int) -> Workspace:
    """Bytes of scratch for at most `picks` picks (tokens x top_k)."""
    a = picks * (intermediate // BLOCK) * launch.split_a * 256 * 4 if launch.split_a > 1 else 0
    b = picks * (hidden // BLOCK) * launch.split_b * 128 * 4 if launch.split_b > 1 else 0
    return Workspace(
        rotated=2 * 2 * picks * hidden,
        act=2 * picks * intermediate,
        partial_a=a,
        partial_b=b,
        y=4 * picks * hidden,
    )
