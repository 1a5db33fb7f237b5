"""From a problem's shape to how the kernels are launched. Pure: no torch, no device.

The numbers and their reasons are in csrc/decode.cuh: a unit is 128 columns of one expert, and
`split_*` cuts its k so that all multiprocessors have work whatever few experts are touched.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOKENS = 64  # rows that read weights in place; above, prefill
MAX_PICKS = 1024
# Rows that read matrices beside the experts in place: 5120 x 6144 takes 20 us at 1 and 52 at 64,
# made dense 59 to 62; 4096 x 5120 takes 16 and 42, dense 32 to 33.
LINEAR_ROWS = 32
MAX_EXPERTS = 1024
PREFILL_SLOTS = 24  # host experts in device memory at once: 318 MB at 13.3 MB each
PREFILL_WINDOW = 2  # groups of rows begun and not yet added: 64 KB of scratch a row at 5120 x 2304
# Of them waited for and released together: small launches leave multiprocessors without work.
# 8,192 tokens, 115 of 384 experts on the host: 34.9 ms with 8, 35.7 with 4; 33.9 and 35.3 with
# nothing to copy.
PREFILL_BATCH = 8
PREFILL_ROWS = 4096  # rows multiplied at once: bounds the scratch
PIECE_ROWS = 128  # rows of a block of the fused products: csrc/experts.h, EXPERTS_PIECE_ROWS
# An expert with as many is made dense for cuBLAS. us fused and dense: 112 and 198 at 256 rows, 164
# and 196 at 512, 285 and 262 at 1,024, 516 and 418 at 2,048.
DENSE_ROWS = 768
BLOCK = 128  # columns of a unit, and the rotation's block
# Some 60 blocks share the link, so many that one expert's units are whole rounds of them: 1 of
# 7168 x 2048, in 64 units of gate and up, takes 343 us with 48 blocks and 335 with 64; of 5120 x
# 2304 with one pick, in 252 short units, 274, 271.7 and 269.9 with 40, 63 and 126.
HOST_BLOCKS = 60
MANY_SHORT_UNITS = 240
# Where the device's experts take as long, host experts get near twice their share of the blocks, so
# that the link is full from the begin to the end: 24 touched, 1 on the host take 287, 278, 279, 285
# us with 165, 180, 200, 220, and 316 to 322 with 95 to 150; 24 and 2 on the host 530 to 532.
LINK_PERCENT = 180
# Under way over the link: 0.1 to 0.2 MB fill it, and a block's other reads wait behind its own. One
# of 5120 x 2304 with 2, 3, 4, 6, 8 stages a warp: 272, 270, 270, 272, 277 us.
LINK_BYTES = 800 << 10
# Parts of k: as many as give every block a unit and none two. us at 5120 x 2304, 1 pick a token,
# with (14, 6), (10, 4), (8, 4) parts: 36.6, 39.6, 40.7; 2 picks with (7, 3), (8, 3), (5, 3): 49.2,
# 53.7, 54.0; 7168 x 2048 with (16, 4), (14, 4), (8, 4): 38.7, 40.9, 47.0. Where that leaves a fifth
# of the blocks without a unit of gate and up, half as many units again as blocks: 6 picks of 7168 x
# 2048 touching 6 experts with 2, 3, 4, 5 parts: 129, 117, 109, 114.
# Several tokens touch nearly as many experts as they have picks: parts cost more than blocks that
# have no work, but for two. us at 5120 x 2304 with 1, 2, 3 parts of gate and up: 12 picks touching
# 12 167, 160, 157; 18 picks 219, 222, 226; 24 picks 281, 290, 299; 36 picks 410, 426, 435; at
# 7168 x 2048 12 picks 215, 180, 185; 18 picks 265, 266, 272; 24 picks 351, 350, 358.
SHORTEST = 320
FILLED = 0.8
FILLED_BY_MORE = 0.9
UNITS_A_BLOCK = 1.5
_WARPS = 8
_RESULT_BYTES = {1: 33792, 2: 67584, 4: 67584, 8: 67584}  # csrc/decode.cuh, Layer::kResultBytes
_STATIC_BYTES = 15104 + 1024  # of a block, and what the system keeps of each
# Multiprocessor's shared memory by architecture; launch bounds allow at most two blocks each.
_SHARED_OF_ONE = {"sm_90": 233472, "sm_120": 102400}


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """`groups` of 8 rows a read of an expert; parts of k of the two products; thread blocks.

    Of the blocks `host_blocks` take host experts at all; `link_percent` of the share that these are
    of all experts, as a share of the blocks, look for them first, with `link_bytes` under way.
    """

    groups: int
    split_a: int
    split_b: int
    blocks: int
    host_blocks: int
    link_percent: int
    link_bytes: int
    ring_bytes: int


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


def ring_bytes(architecture: str) -> int:
    """Of a warp: csrc/stream.cuh, kRingBytes."""
    return 8192 if _SHARED_OF_ONE.get(architecture, 0) > 128 << 10 else 6144


def shared_bytes(groups: int, architecture: str) -> int:
    """Shared memory that a block takes in all: csrc/decode.cuh, Layer::shared_bytes and Shared."""
    rings, result = _WARPS * ring_bytes(architecture), _RESULT_BYTES[groups]
    return (rings + result if groups == 1 else max(rings, result)) + _STATIC_BYTES


def decode(
    tokens: int,
    hidden: int,
    intermediate: int,
    multiprocessors: int,
    architecture: str = "sm_90",
    *,
    top_k: int,
) -> DecodeLaunch:
    """For 1..64 tokens. Depends on the shape alone, never on homes or routing: so do the bits.

    Tokens up to the next power of two are launched alike: a step has the same bits when it is
    padded to the size of a captured graph.
    """
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"decode takes 1 to {MAX_TOKENS} tokens, not {tokens}: above is prefill")
    tokens = alike(tokens)
    groups = max(1, tokens // 8)
    shared = _SHARED_OF_ONE.get(architecture, _SHARED_OF_ONE["sm_120"])
    resident = max(1, min(2, shared // shared_bytes(groups, architecture)))
    # Few rows touch few experts: cut their k. More rows touch more experts.
    split_a = split_b = 1
    blocks = resident * multiprocessors
    if groups == 1:
        units = tokens * top_k * intermediate // BLOCK
        split_a = _parts(hidden, units, blocks)
        if tokens > 1 and units * split_a < FILLED_BY_MORE * blocks:
            split_a = _parts(hidden, units, (split_a + 1) * units)
        if tokens == 1 and units * split_a < FILLED * blocks:
            split_a = _parts(hidden, units, UNITS_A_BLOCK * blocks)
        split_b = _parts(intermediate, tokens * top_k * hidden // BLOCK, blocks)
    return DecodeLaunch(
        groups=groups,
        split_a=split_a,
        split_b=split_b,
        blocks=blocks,
        host_blocks=min(_host_blocks(hidden, intermediate, split_a, split_b), blocks),
        link_percent=LINK_PERCENT,
        link_bytes=LINK_BYTES,
        ring_bytes=ring_bytes(architecture),
    )


def alike(tokens: int) -> int:
    """The most tokens that are launched as these are: the next power of two."""
    return 1 << (tokens - 1).bit_length()


@dataclass(frozen=True, slots=True)
class LinearLaunch:
    """`groups` of 8 rows; parts of k that different thread blocks work on."""

    groups: int
    split: int
    ring_bytes: int


def linear(
    rows: int, k: int, blocks: int, multiprocessors: int, architecture: str = "sm_90"
) -> LinearLaunch:
    """For 1..32 rows through matrices of `blocks` blocks of 128 outputs in all.

    As many parts of k as can be worked on at once, each of at least 256 rows: a warp has two tiles.
    """
    if not 1 <= rows <= LINEAR_ROWS:
        raise ValueError(f"1 to {LINEAR_ROWS} rows are multiplied in place, not {rows}")
    groups = next(g for g in (1, 2, 4) if rows <= 8 * g)
    shared = _SHARED_OF_ONE.get(architecture, _SHARED_OF_ONE["sm_120"])
    ring = ring_bytes(architecture)
    rings, result = _WARPS * ring, _RESULT_BYTES[groups]
    resident = max(1, min(3 if groups == 1 else 2, shared // (max(rings, result) + 1280)))
    at_once = resident * multiprocessors
    # A head that leaves a quarter of them without work: 107 us whole, 77 in two parts.
    split = 2 if at_once * 3 // 4 > blocks > at_once // 2 else at_once // blocks
    return LinearLaunch(groups, max(1, min(split, k // 256, 16)), ring)


def _host_blocks(hidden: int, intermediate: int, split_a: int, split_b: int) -> int:
    """Near HOST_BLOCKS, so that units of one expert or of a few are whole rounds of them."""
    units = max(intermediate // BLOCK * split_a, hidden // BLOCK * split_b)
    if units <= HOST_BLOCKS:
        return HOST_BLOCKS // units * units
    near = HOST_BLOCKS if units < MANY_SHORT_UNITS else 2 * HOST_BLOCKS
    return -(-units // round(units / near))


def _parts(k: int, units: int, most: float) -> int:
    """Parts of at least SHORTEST of k rows that `units` units are cut into: `most` in all."""
    return max(1, min(int(most // units), k // SHORTEST))


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
