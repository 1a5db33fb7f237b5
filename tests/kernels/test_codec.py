"""The shape of EXL3's bits: rings, packing, parts of a trellis, and what is refused."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from expert_kernels import codec

pytestmark = pytest.mark.engine

any_bits = st.sampled_from([*codec.WHOLE_BITS, *codec.HALF_BITS])


def random_trellis(rows: int, columns: int, bits: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns, int(16 * bits))
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator)


@st.composite
def trellises(draw: st.DrawFn) -> tuple[torch.Tensor, float]:
    bits = draw(any_bits)
    size = int(32 * bits) * draw(st.integers(1, 3))
    raw = draw(st.binary(min_size=size, max_size=size))
    halfwords = torch.frombuffer(bytearray(raw), dtype=torch.int16)
    return halfwords.view(-1, int(16 * bits)), bits


@given(trellises())
@settings(deadline=None, max_examples=60)
def test_neighbours_on_the_ring_share_all_but_the_bits_of_one_step(
    given_trellis: tuple[torch.Tensor, float],
) -> None:
    trellis, bits = given_trellis
    states = codec.unpack_states(trellis)
    ends = torch.floor(bits * torch.arange(257, dtype=torch.float64)).int()
    step = ends.diff()
    kept = states.roll(1, -1) & ((1 << (16 - step)) - 1)
    assert torch.equal(states >> step, kept)


@given(trellises())
@settings(deadline=None, max_examples=60)
def test_packing_undoes_unpacking(given_trellis: tuple[torch.Tensor, float]) -> None:
    trellis, bits = given_trellis
    packed = codec.pack_states(codec.unpack_states(trellis), bits)
    assert packed.dtype == torch.int16
    assert torch.equal(packed, trellis)


def test_states_that_no_trellis_holds_are_refused_with_their_place() -> None:
    states = codec.unpack_states(random_trellis(1, 2, 3.0))
    states[0, 1, 200] ^= 1 << 15
    with pytest.raises(ValueError, match=r"tile 1, position 200: .* does not continue"):
        codec.pack_states(states, 3.0)
    with pytest.raises(ValueError, match="256 states, not 255"):
        codec.pack_states(states[..., 1:], 3.0)


@pytest.mark.parametrize("bits", [1.5, 3.0, 8.0])
def test_a_part_of_a_trellis_decodes_to_that_part_of_the_weights(bits: float) -> None:
    # 140 rows of 8 tiles are more than one chunk; a cut along n is not contiguous.
    trellis = random_trellis(140, 8, bits)
    whole = codec.decode_trellis(trellis, "mul1")
    assert torch.equal(codec.decode_trellis(trellis[100:], "mul1"), whole[1600:])
    assert torch.equal(codec.decode_trellis(trellis[:, 3:6], "mul1"), whole[:, 48:96])


class Sizes(TorchDispatchMode):
    """The bytes behind each tensor that torch makes while this is active."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        out: torch.Tensor = func(*args, **(kwargs or {}))
        self.seen.append(out.untyped_storage().nbytes())
        return out


def test_decoding_a_large_matrix_needs_little_memory_beside_the_result() -> None:
    trellis = random_trellis(64, 144, 3.0)
    with Sizes() as sizes:
        result = codec.decode_trellis(trellis, "mcg")
    own = {result.nbytes, trellis.nbytes}
    assert max(size for size in sizes.seen if size not in own) <= 1 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_wider_dtypes_hold_the_same_numbers(dtype: torch.dtype) -> None:
    trellis = random_trellis(4, 4, 4.0)
    half = codec.decode_trellis(trellis, "3inst")
    assert torch.equal(codec.decode_trellis(trellis, "3inst", dtype), half.to(dtype))


def test_sign_words_of_older_files_unpack_low_bit_first() -> None:
    packed = torch.tensor([0b101, -(1 << 15)], dtype=torch.int16)
    expected = torch.ones(32, dtype=torch.float16)
    expected[[0, 2, 31]] = -1
    assert torch.equal(codec.unpack_signs(packed), expected)


@pytest.mark.parametrize("bits", [*codec.WHOLE_BITS, *codec.HALF_BITS])
def test_bits_come_from_the_shape(bits: float) -> None:
    assert codec.bits_of(random_trellis(1, 1, bits)) == bits


@pytest.mark.parametrize(
    ("trellis", "codebook", "sentence"),
    [
        (torch.zeros(2, 2, 47, dtype=torch.int16), "mcg", "47 halfwords a tile are K = 2.9375"),
        (torch.zeros(2, 2, 144, dtype=torch.int16), "mcg", "144 halfwords a tile are K = 9"),
        (torch.zeros(2, 48, dtype=torch.int16), "mcg", r"a trellis is int16 .*int16 \[2, 48\]"),
        (torch.zeros(2, 2, 48, dtype=torch.int32), "mcg", "a trellis is int16 .*int32"),
        (torch.zeros(2, 2, 24, dtype=torch.int16), "mcg", "1.5-bit weights exist with .* mul1"),
        (torch.zeros(2, 2, 48, dtype=torch.int16), "2inst", "'2inst' is none of 3inst, mcg, mul1"),
    ],
)
def test_what_exl3_does_not_have_is_refused(
    trellis: torch.Tensor, codebook: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        codec.decode_trellis(trellis, codebook)


def test_a_default_device_set_by_a_loader_does_not_move_the_tables() -> None:
    trellis = random_trellis(2, 2, 3.0)
    expected = codec.decode_trellis(trellis, "mcg")
    codec._values.cache_clear()
    codec._gather.cache_clear()
    with torch.device("meta"):
        assert torch.equal(codec.decode_trellis(trellis, "mcg"), expected)
        assert torch.equal(codec.pack_states(codec.unpack_states(trellis), 3.0), trellis)
