"""Random tensors as bytes, without NumPy: one random byte picks one of 256 ready-made values.

Every tensor has its own generator, seeded by (seed, name): the same spec gives the same bytes
whatever the order or the number of shards.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable
from functools import cache
from random import Random
from statistics import NormalDist

Draw = Callable[[Random], bytes]

# Standard deviation of a decoded value over all 65,536 states of each codebook, by computing it.
CODEBOOK_STD = {"3inst": 1.2437, "mcg": 1.2441, "mul1": 1.0003}
# What exllamav3 stores: the multiplier itself. Its presence is what selects the codebook.
MARKERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
QUIET = 1 / 256  # scale of an output that must never win an argmax

_NORMAL = tuple(NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256))
# A sign and a magnitude in 0.75..1.25: a decoder that drops either is found out.
_SIGNED = tuple((0.75 + (i >> 1) / 254) * (-1 if i & 1 else 1) for i in range(256))


def bf16(value: float) -> bytes:
    """Nearest bfloat16, ties to even, little-endian."""
    (word,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (word + 0x7FFF + ((word >> 16) & 1)) >> 16)


def fp16(value: float) -> bytes:
    return struct.pack("<e", value)


def _pick(random: Random, count: int, values: Iterable[bytes]) -> bytearray:
    """`count` two-byte values, each one of 256, as two byte translations."""
    pairs = list(values)
    raw = random.randbytes(count)
    out = bytearray(2 * count)
    out[0::2] = raw.translate(bytes(pair[0] for pair in pairs))
    out[1::2] = raw.translate(bytes(pair[1] for pair in pairs))
    return out


@cache
def _normal_table(mean: float, std: float) -> tuple[bytes, ...]:
    return tuple(bf16(mean + std * x) for x in _NORMAL)


def normal(count: int, std: float, *, mean: float = 0.0) -> Draw:
    """bf16 values of N(mean, std)."""
    return lambda random: bytes(_pick(random, count, _normal_table(mean, std)))


def normal_f32(count: int, std: float) -> Draw:
    """float32 values of N(0, std)."""
    return lambda random: struct.pack(
        f"<{count}f", *(std * _NORMAL[byte] for byte in random.randbytes(count))
    )


def rows(n: int, k: int, std: float, quiet: Collection[int] = ()) -> Draw:
    """A bf16 matrix [n, k]; the rows in `quiet` are 256 times smaller."""

    def draw(random: Random) -> bytes:
        out = _pick(random, n * k, _normal_table(0.0, std))
        for row in quiet:
            out[2 * row * k : 2 * (row + 1) * k] = _pick(random, k, _normal_table(0.0, std * QUIET))
        return bytes(out)

    return draw


def trellis(size_bytes: int) -> Draw:
    """Any random bits are a valid trellis (FACTS section 2)."""
    return lambda random: random.randbytes(size_bytes)


def scales(count: int, size: float = 1.0, quiet: Collection[int] = ()) -> Draw:
    """fp16 scales of random sign, 0.75 to 1.25 times `size`; those in `quiet` 256 times smaller."""

    def draw(random: Random) -> bytes:
        out = _pick(random, count, (fp16(size * x) for x in _SIGNED))
        for place in quiet:
            (value,) = struct.unpack_from("<e", out, 2 * place)
            struct.pack_into("<e", out, 2 * place, value * QUIET)
        return bytes(out)

    return draw


def output_scale(k: int, codebook: str, gain: float) -> float:
    """Size of svh for which inputs of unit variance give outputs of standard deviation `gain`."""
    return gain / (math.sqrt(k) * CODEBOOK_STD[codebook])


def marker(codebook: str) -> Draw:
    return lambda random: struct.pack("<I", MARKERS[codebook])
