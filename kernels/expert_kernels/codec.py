"""EXL3's bits: from trellis words to the fp16 weights of the rotated basis, and back.

A trellis is int16 [k/16, n/16, 16*K]: one row of 256*K bits per 16x16 tile of W_hat. Read as
little-endian uint32, most significant bit first, the row is a ring. Position t of 0..255 owns the
16 bits that end after floor(K*(t+1)) bits: its state. A codebook maps a state to a value, and
the position maps to a place in the tile (the order of an mma.m16n8k16 operand):

    lane = t>>3, j = t&7; row k = 2*(lane&3) + (j&1) + 8*((j>>1)&1); column n = (lane>>2) + 8*(j>>2)

Source: FACTS section 2, which agrees bit for bit with exllamav3 1.6.5's `reconstruct` (MIT).

How it is made fast: 32 positions span exactly 2*K halfwords, so t = 32*q + r needs one halfword
number and one shift for each r, whatever q and the tile. And r alone decides the row and the half
of the columns (q is the column within the half): gathering the 32 r in the order of the tile's
rows leaves only runs of eight weights to be moved.
"""

from __future__ import annotations

from functools import lru_cache

import torch

CODEBOOKS = ("3inst", "mcg", "mul1")
WHOLE_BITS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
HALF_BITS = (1.5, 2.5, 3.5)
TILE = 16
POSITIONS = 256
_PERIOD = 32
# Weights decoded at once: their int32 states (1 MiB) stay in one core's second-level cache.
_CHUNK = 1 << 18


def check_format(bits: float, codebook: str) -> None:
    """Nothing if EXL3 has such weights; ValueError with what it has if not."""
    if codebook not in CODEBOOKS:
        raise ValueError(f"codebook {codebook!r} is none of {', '.join(CODEBOOKS)}")
    if bits not in WHOLE_BITS and bits not in HALF_BITS:
        raise ValueError(f"EXL3 has no {bits:g}-bit weights: K is 1 to 8, or 1.5, 2.5, 3.5")
    if bits in HALF_BITS and codebook != "mul1":
        raise ValueError(f"{bits:g}-bit weights exist with codebook mul1 only, not {codebook}")


def bits_of(trellis: torch.Tensor) -> float:
    """K, from the shape (never from a config). ValueError if this is no trellis."""
    if trellis.ndim != 3 or trellis.dtype != torch.int16:
        raise ValueError(
            f"a trellis is int16 [k/16, n/16, 16*K], not {trellis.dtype} {list(trellis.shape)}"
        )
    return _bits(trellis.shape[-1])


def _bits(halfwords: int) -> float:
    bits = halfwords / 16
    if bits not in WHOLE_BITS and bits not in HALF_BITS:
        raise ValueError(f"{halfwords} halfwords a tile are K = {bits:g}, which EXL3 does not have")
    return bits


@lru_cache
def _values(codebook: str, device: torch.device) -> torch.Tensor:
    """fp16 [65536], the value of every state."""
    w = torch.arange(1 << 16, dtype=torch.int64, device=device)
    if codebook == "mul1":
        x = (w * 0x83DCD12D) & 0xFFFFFFFF
        total = (x & 255) + ((x >> 8) & 255) + ((x >> 16) & 255) + (x >> 24)
        # fma(1024 + s, half 0x1EEE, half 0xC931): 22 bits hold the product and the sum, so the only
        # rounding is the one to fp16.
        value = ((1024 + total).double() * (1774 / 2**18) - 1329 / 2**7).half()
    else:
        x = w * 89226354 + 64248484 if codebook == "3inst" else w * 0xCBAC1FED
        x = (x & 0x8FFF8FFF) ^ 0x3B603B60
        low, high = ((x >> s).to(torch.int16).view(torch.half) for s in (0, 16))
        value = low + high
    return value


@lru_cache
def _gather(
    bits: float, row_major: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each r of 0..31: [32] which halfword its window ends in, [32, 1] the shift down."""
    r = torch.arange(_PERIOD, device=device)
    if row_major:
        row, right = 2 * (r >> 3) + (r & 1) + 8 * ((r >> 1) & 1), (r >> 2) & 1
        r = torch.argsort(2 * row + right)
    end = torch.floor(bits * (r + 1)).long()
    halfword = (end - 1) >> 4
    shift = (16 * (halfword + 1) - end).to(torch.int32)
    return halfword, shift.unsqueeze(1)


def _states(tiles: torch.Tensor, row_major: bool) -> torch.Tensor:
    """int16 [m, 16*K] -> int32 [32, m*8]: the state of position 32*q + r of tile i at [r, 8*i+q].

    With `row_major` the 32 r come as (row of 16, half of columns of 2).
    """
    halfwords = tiles.shape[1]
    halfword, shift = _gather(halfwords / 16, row_major, tiles.device)
    words = tiles.view(torch.int32)
    # Every window lies in two neighbouring halfwords: those that end at each halfword, on the ring.
    ends_high = (words.roll(1, 1) << 16) | ((words >> 16) & 0xFFFF)
    pairs = torch.stack((ends_high, words), -1).view(-1, halfwords // 8).t().contiguous()
    states = pairs.index_select(0, halfword)
    states >>= shift
    states &= 0xFFFF
    return states


def unpack_states(trellis: torch.Tensor) -> torch.Tensor:
    """int16 [..., 16*K] -> int32 [..., 256], the 16-bit state of each position in order."""
    lead, halfwords = trellis.shape[:-1], trellis.shape[-1]
    _bits(halfwords)
    states = _states(trellis.reshape(-1, halfwords), row_major=False)
    return states.view(_PERIOD, -1, 8).permute(1, 2, 0).reshape(*lead, POSITIONS)


def pack_states(states: torch.Tensor, bits: float) -> torch.Tensor:
    """int [..., 256] states -> int16 [..., 16*K], the inverse of `unpack_states`.

    Neighbours share all but their last bits (the ring closes too): ValueError if they do not.
    """
    _bits(int(16 * bits))
    if states.shape[-1] != POSITIONS:
        raise ValueError(f"a tile has {POSITIONS} states, not {states.shape[-1]}")
    flat = states.reshape(-1, POSITIONS).long()
    device = states.device
    ends = torch.floor(bits * torch.arange(POSITIONS + 1, device=device).double()).long()
    bit = torch.arange(int(POSITIONS * bits), device=device)
    owner = torch.searchsorted(ends[1:], bit, right=True)
    stream = (flat[:, owner] >> (ends[owner + 1] - 1 - bit)) & 1
    weight = 1 << torch.arange(15, -1, -1, device=device)
    halves = (stream.view(flat.shape[0], -1, 16) * weight).sum(-1)
    trellis = halves.view(flat.shape[0], -1, 2).flip(-1).to(torch.int16).flatten(1)
    wrong = (unpack_states(trellis) != flat).nonzero()
    if len(wrong):
        tile, position = wrong[0].tolist()
        raise ValueError(
            f"tile {tile}, position {position}: state {flat[tile, position]:#06x} does not continue"
            " its neighbour's bits, so no trellis holds these states"
        )
    return trellis.view(*states.shape[:-1], -1)


def unpack_signs(packed: torch.Tensor) -> torch.Tensor:
    """int16 [d/16] sign words of older files (`su`, `sv`) -> fp16 [d] of +1 and -1.

    Bit i of word j is element 16*j + i; a set bit is -1.
    """
    bits = (packed.long().unsqueeze(-1) >> torch.arange(16, device=packed.device)) & 1
    return (1 - 2 * bits).half().flatten()


def decode_trellis(
    trellis: torch.Tensor, codebook: str, dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    """W_hat [k, n], the weights in the rotated basis: what exllamav3's `reconstruct` returns.

    trellis int16 [k/16, n/16, 16*K]. Values are fp16 numbers whatever the dtype that holds them.
    ValueError on a shape, K or codebook that EXL3 does not have.
    """
    check_format(bits_of(trellis), codebook)
    rows, columns, halfwords = trellis.shape
    lut = _values(codebook, trellis.device)
    out = torch.empty((rows * TILE, columns * TILE), dtype=dtype, device=trellis.device)
    step = max(1, _CHUNK // max(1, columns * POSITIONS))
    for start in range(0, rows, step):
        tiles = trellis[start : start + step].reshape(-1, halfwords)
        weights = lut.index_select(0, _states(tiles, row_major=True).view(-1))
        # Eight weights that stay neighbours are moved as one 16-byte number.
        runs = weights.view(torch.complex128).view(TILE, 2, -1, columns).permute(2, 0, 3, 1)
        in_place = runs.contiguous().view(torch.float16).view(-1, columns * TILE)
        out[start * TILE : start * TILE + len(in_place)] = in_place
    return out
