"""Rows of a lookup table: the layouts bit by bit, and what is asked wrongly."""

import pytest
import torch

from expert_kernels import lookup

pytestmark = pytest.mark.engine


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    room = torch.empty(rows.numel() + 16, dtype=torch.uint8)
    skip = -room.data_ptr() % 16
    return room[skip : skip + rows.numel()].view(rows.shape).copy_(rows)


def _int4(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(-8, 8, (rows, 256), dtype=torch.int8, generator=generator)
    scales = torch.randn(rows, 8, generator=generator).half()
    return _aligned(lookup.pack_int4(values, scales)), values, scales


def test_an_int4_row_is_low_half_first_then_a_scale_for_each_32() -> None:
    row = torch.zeros(1, 144, dtype=torch.uint8)
    row[0, :128] = 0x88  # zeros
    row[0, 0] = 0x1F  # value 0 is 15 - 8, value 1 is 1 - 8
    row[0, 16] = 0x08  # value 33 is 0 - 8
    row[0, 128:] = torch.tensor([1.0, 0.5, *[2.0] * 6]).half().view(torch.uint8)
    got = lookup.unpack(row, "int4")[0]
    assert got[:2].tolist() == [7.0, -7.0] and got[33] == -4.0
    assert got.count_nonzero() == 3


def test_an_fp8_row_is_e4m3_then_powers_of_two() -> None:
    row = torch.zeros(1, 264, dtype=torch.uint8)
    row[0, :3] = torch.tensor([0x38, 0xC4, 0x7E])  # 1, -3, 448
    row[0, 32] = 0x38
    row[0, 256:] = 127
    row[0, 257] = 124
    got = lookup.unpack(row, "fp8")[0]
    assert got[:3].tolist() == [1.0, -3.0, 448.0] and got[32] == 0.125
    row[0, 256] = 255
    assert lookup.unpack(row, "fp8")[0, :32].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lookups_are_the_dense_tables_rows(dtype: torch.dtype) -> None:
    rows, values, scales = _int4(50)
    dense = values.float() * scales.float().repeat_interleave(32, 1)
    table = lookup.RowTable(rows.data_ptr(), 50, "int4")
    ids = torch.tensor([[3, 49, 3], [0, -1, 17]])
    expected = torch.where(ids[..., None] >= 0, dense[ids], 0.0).to(dtype)
    assert torch.equal(lookup.lookup(ids, table, dtype), expected)
    assert lookup.lookup(ids[:0], table, dtype).shape == (0, 3, 256)


def test_fp8_rows_are_values_times_their_groups_scale() -> None:
    values = torch.randn(9, 256).to(torch.float8_e4m3fn)
    exponents = torch.randint(100, 140, (9, 8), dtype=torch.uint8)
    rows = _aligned(lookup.pack_fp8(values, exponents))
    dense = values.double() * (2.0 ** (exponents.double() - 127)).repeat_interleave(32, 1)
    ids = torch.arange(8, -1, -1)
    got = lookup.lookup(ids, lookup.RowTable(rows.data_ptr(), 9, "fp8"), torch.float32)
    assert torch.equal(got.double(), dense[ids])


def test_rows_have_the_bytes_that_the_plan_counts() -> None:
    assert lookup.pack_int4(*_int4(2)[1:]).shape == (2, 144)
    values = torch.zeros(2, 256).to(torch.float8_e4m3fn)
    assert lookup.pack_fp8(values, torch.zeros(2, 8, dtype=torch.uint8)).shape == (2, 264)


def test_what_cannot_be_a_table_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="'int3' is no row format: there are int4, fp8"):
        lookup.RowTable(4096, 1, "int3")
    with pytest.raises(ValueError, match="0x1008"):
        lookup.RowTable(0x1008, 1, "int4")
    with pytest.raises(ValueError, match="run from -8 to 8, not -8 to 7"):
        lookup.pack_int4(
            torch.arange(-8, 9).repeat(16)[:256].view(1, -1).to(torch.int8), _int4(1)[2]
        )


def test_numbers_outside_the_table_are_refused() -> None:
    rows, *_ = _int4(4)
    table = lookup.RowTable(rows.data_ptr(), 4, "int4")
    for bad in (4, -2):
        with pytest.raises(ValueError, match="the table has rows 0 to 3"):
            lookup.lookup(torch.tensor([0, bad]), table, torch.float32)
    with pytest.raises(ValueError, match="int64 ids"):
        lookup.lookup(torch.tensor([0], dtype=torch.int32), table, torch.float32)
