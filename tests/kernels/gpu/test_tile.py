"""The bit tricks of the CUDA kernels, compiled for the CPU from the very same text."""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from expert_kernels import build, codec

pytestmark = pytest.mark.engine

BITS = (*codec.WHOLE_BITS, *codec.HALF_BITS)


@pytest.fixture(scope="module")
def tile(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("tile") / "tile.so"
    source = Path(__file__).with_name("tile_on_host.cpp")
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared"]
    subprocess.run(
        [*command, "-fPIC", f"-I{build.SOURCES}", str(source), "-o", str(library)], check=True
    )
    lib = ctypes.CDLL(str(library))
    lib.mixed.restype = ctypes.c_uint32
    lib.mixed.argtypes = [ctypes.c_int, ctypes.c_uint32]
    return lib


def _states(lib: ctypes.CDLL, trellis: torch.Tensor) -> torch.Tensor:
    bits8 = trellis.shape[-1] // 2
    out = torch.empty(256, dtype=torch.int32)
    assert (
        lib.tile_states(bits8, ctypes.c_void_p(trellis.data_ptr()), ctypes.c_void_p(out.data_ptr()))
        == 0
    )
    return out


@pytest.mark.parametrize("bits", BITS)
def test_every_lane_reads_the_states_of_its_eight_positions(tile: ctypes.CDLL, bits: float) -> None:
    generator = torch.Generator().manual_seed(int(8 * bits))
    tiles = torch.randint(
        -(1 << 15), 1 << 15, (20, int(16 * bits)), dtype=torch.int16, generator=generator
    )
    for trellis, expected in zip(tiles, codec.unpack_states(tiles), strict=True):
        assert torch.equal(_states(tile, trellis), expected)


@pytest.mark.parametrize("bits", BITS)
def test_a_lanes_states_are_its_own_fragment_of_the_transposed_tile(
    tile: ctypes.CDLL, bits: float
) -> None:
    """mma.m16n8k16, operand A [m, k] = tile^T [n, k], by the PTX manual: register i of a lane holds
    row lane/4 + 8*(i & 1), columns 2*(lane%4) + 8*(i >> 1) and the next."""
    trellis = torch.randint(-(1 << 15), 1 << 15, (1, 1, int(16 * bits)), dtype=torch.int16)
    values = codec._values("mul1", torch.device("cpu"))[_states(tile, trellis.flatten()).long()]
    transposed = torch.full((16, 16), float("nan"), dtype=torch.float16)
    registers = ((0, 1), (4, 5), (2, 3), (6, 7))  # as `fragment` fills a[0..3]
    for lane in range(32):
        for i, pair in enumerate(registers):
            for half, j in enumerate(pair):
                transposed[lane // 4 + 8 * (i & 1), 2 * (lane % 4) + 8 * (i >> 1) + half] = values[
                    8 * lane + j
                ]
    assert torch.equal(transposed.T, codec.decode_trellis(trellis, "mul1"))


@pytest.mark.parametrize("codebook", ["3inst", "mcg"])
def test_the_two_halves_of_a_state_add_up_to_its_value(tile: ctypes.CDLL, codebook: str) -> None:
    number = {"3inst": 0, "mcg": 1}[codebook]
    mixed = torch.tensor([tile.mixed(number, w) for w in range(1 << 16)])
    low, high = ((mixed >> s).to(torch.int16).view(torch.half) for s in (0, 16))
    assert torch.equal(low + high, codec._values(codebook, torch.device("cpu")))


def test_the_byte_sum_of_mul1_is_a_half_above_1024(tile: ctypes.CDLL) -> None:
    total = (
        torch.tensor([tile.mixed(2, w) for w in range(1 << 16)]).to(torch.int16).view(torch.half)
    )
    scale, bias = (
        torch.tensor(v, dtype=torch.int16).view(torch.half).double()
        for v in (0x1EEE, 0xC931 - (1 << 16))
    )
    value = (total.double() * scale + bias).half()
    assert torch.equal(value, codec._values("mul1", torch.device("cpu")))
