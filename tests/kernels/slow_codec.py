"""A second decoder, one bit at a time in pure Python, written from the words of FACTS section 2.

It shares nothing with the code under test: struct's half precision instead of torch's, lists of
bits instead of shifts, exact Python floats rounded once.
"""

import math
import struct


def half(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def half_bits(value: float) -> int:
    return struct.unpack("<H", struct.pack("<e", value))[0]


def value(state: int, codebook: str) -> int:
    """The fp16 bit pattern of one state."""
    if codebook == "mul1":
        x = (state * 0x83DCD12D) % 2**32
        total = sum(x.to_bytes(4, "little"))
        return half_bits((1024 + total) * half(0x1EEE) + half(0xC931))
    x = state * 89226354 + 64248484 if codebook == "3inst" else state * 0xCBAC1FED
    x = (x % 2**32 & 0x8FFF8FFF) ^ 0x3B603B60
    return half_bits(half(x & 0xFFFF) + half(x >> 16))


def ring(halfwords: list[int]) -> list[int]:
    """The bits of a tile: each little-endian uint32, most significant bit first."""
    raw = struct.pack(f"<{len(halfwords)}H", *(h & 0xFFFF for h in halfwords))
    words = struct.unpack(f"<{len(halfwords) // 2}I", raw)
    return [int(bit) for word in words for bit in f"{word:032b}"]


def states(halfwords: list[int], bits: float) -> list[int]:
    stream = ring(halfwords)
    assert len(stream) == 256 * bits
    out = []
    for t in range(256):
        end = math.floor(bits * (t + 1))
        window = [stream[i % len(stream)] for i in range(end - 16, end)]
        out.append(int("".join(map(str, window)), 2))
    return out


def tile(halfwords: list[int], bits: float, codebook: str) -> list[list[int]]:
    """[16][16] fp16 bit patterns, rows of k, columns of n."""
    out = [[0] * 16 for _ in range(16)]
    for t, state in enumerate(states(halfwords, bits)):
        lane, j = t >> 3, t & 7
        row = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1)
        column = (lane >> 2) + 8 * ((j >> 2) & 1)
        out[row][column] = value(state, codebook)
    return out
