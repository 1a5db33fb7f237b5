"""Decoding against a second decoder, written here from the words of FACTS section 2.

It reads one bit at a time in pure Python and shares nothing with the code under test: struct's
half precision instead of torch's, lists of bits instead of shifts, exact floats rounded once.
"""

import importlib.util
import math
import statistics
import struct
from pathlib import Path

import pytest
import torch

from expert_kernels import codec

pytestmark = pytest.mark.engine

FORMATS = [
    (bits, codebook)
    for codebook in codec.CODEBOOKS
    for bits in (*codec.WHOLE_BITS, *(codec.HALF_BITS if codebook == "mul1" else ()))
]


def random_trellis(rows: int, columns: int, bits: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns, int(16 * bits))
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)


def half(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def half_bits(value: float) -> int:
    return struct.unpack("<H", struct.pack("<e", value))[0]


def slow_value(state: int, codebook: str) -> int:
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


def slow_states(halfwords: list[int], bits: float) -> list[int]:
    stream = ring(halfwords)
    assert len(stream) == 256 * bits
    out = []
    for t in range(256):
        end = math.floor(bits * (t + 1))
        window = [stream[i % len(stream)] for i in range(end - 16, end)]
        out.append(int("".join(map(str, window)), 2))
    return out


def place(t: int) -> tuple[int, int]:
    lane, j = t >> 3, t & 7
    return 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1), (lane >> 2) + 8 * ((j >> 2) & 1)


def slow_tile(halfwords: list[int], bits: float, codebook: str) -> list[list[int]]:
    """[16][16] fp16 bit patterns, rows of k, columns of n."""
    out = [[0] * 16 for _ in range(16)]
    for t, state in enumerate(slow_states(halfwords, bits)):
        row, column = place(t)
        out[row][column] = slow_value(state, codebook)
    return out


@pytest.mark.parametrize(("bits", "codebook"), FORMATS)
def test_decoding_agrees_bit_for_bit_with_a_decoder_that_reads_one_bit_at_a_time(
    bits: float, codebook: str
) -> None:
    trellis = random_trellis(2, 3, bits)
    decoded = codec.decode_trellis(trellis, codebook)
    assert decoded.dtype == torch.float16
    patterns = decoded.view(torch.int16).int() & 0xFFFF
    for i in range(2):
        for j in range(3):
            expected = slow_tile(trellis[i, j].tolist(), bits, codebook)
            assert patterns[16 * i : 16 * i + 16, 16 * j : 16 * j + 16].tolist() == expected


@pytest.mark.parametrize(("bits", "codebook"), FORMATS)
def test_states_come_in_the_order_of_positions(bits: float, codebook: str) -> None:
    trellis = random_trellis(1, 2, bits, seed=2)
    states = codec.unpack_states(trellis)
    assert [s.tolist() for s in states[0]] == [
        slow_states(halfwords.tolist(), bits) for halfwords in trellis[0]
    ]


def value_of_every_state(codebook: str) -> torch.Tensor:
    """fp16 [65536] from 512 tiles at K = 8, where every second state is a halfword of the ring."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(512, 64, 2)
    decoded = codec.decode_trellis(every.flip(-1).reshape(512, 1, 128), codebook)
    rows, columns = zip(*(place(t) for t in range(1, 256, 2)), strict=True)
    return decoded.view(512, 16, 16)[:, rows, columns].flatten()


@pytest.mark.parametrize("codebook", codec.CODEBOOKS)
def test_all_65536_states_have_the_value_of_the_definition(codebook: str) -> None:
    patterns = value_of_every_state(codebook).view(torch.int16).int() & 0xFFFF
    assert patterns.tolist() == [slow_value(state, codebook) for state in range(1 << 16)]


def test_codebooks_have_the_spread_that_their_definitions_imply() -> None:
    """mul1: four uniform bytes, scaled. The others: two halves, each a sign, one of the four
    exponents -3 to 0 and a uniform mantissa, so E[x^2] is 7/3 of the mean of 4^exponent."""
    byte_variance = (2**16 - 1) / 12
    sums = math.sqrt(2 * 7 / 3 * statistics.mean(4.0**e for e in (-3, -2, -1, 0)))
    expected = {"mul1": math.sqrt(4 * byte_variance) * half(0x1EEE), "mcg": sums, "3inst": sums}
    for codebook, deviation in expected.items():
        values = value_of_every_state(codebook).double()
        assert values.mean().item() == pytest.approx(0, abs=0.01)
        assert values.std().item() == pytest.approx(deviation, rel=0.005)
        assert values.abs().max() < 4


@pytest.mark.shared
@pytest.mark.parametrize(("bits", "codebook"), FORMATS)
def test_decoding_agrees_with_the_prototype_that_matched_exllamav3(
    bits: float, codebook: str, shared: Path
) -> None:
    spec = importlib.util.spec_from_file_location("exl3_ref", shared / "prototype/exl3_ref.py")
    assert spec is not None
    assert spec.loader is not None
    prototype = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prototype)
    trellis = random_trellis(9, 8, bits, seed=1)
    number = codec.CODEBOOKS.index(codebook)
    expected = torch.from_numpy(prototype.decode_inner(trellis.numpy(), number))
    decoded = codec.decode_trellis(trellis, codebook)
    assert torch.equal(decoded.view(torch.int16), expected.view(torch.int16))
