"""Rows of a lookup table (Engram-like tables, embeddings) by number, from any readable memory.

A row has 256 values in 8 groups of 32, each with a scale, values first:

    int4   144 bytes: 128 of packed values, byte b has value 2b in its low half and 2b + 1 in its
           high half, as value + 8; 8 fp16 scales. value = (half - 8) * scale
    fp8    264 bytes: 256 of e4m3; 8 E8M0 scales. value = e4m3 * 2^(scale - 127)

Rows lie behind each other from a 16-byte aligned address. The int4 layout is ours; the fp8 values
and scales are those of a checkpoint that has them in two tensors (FACTS section 1), put together so
that a row is one read. A GPU reads at most 49 million records a second over the link, whatever
their size (FACTS section 3): so numbers are sorted and each row is read once a call.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

VALUES, GROUP = 256, 32
ROW_BYTES = {"int4": 144, "fp8": 264}
FORMATS = {"int4": 0, "fp8": 1}
SORTED_FROM = 64  # as few rows as this are read at once anyway


@dataclass(frozen=True)
class RowTable:
    """`rows` rows of `format` from `address` on. ValueError if that cannot be."""

    address: int
    rows: int
    format: str

    def __post_init__(self) -> None:
        if self.format not in ROW_BYTES:
            raise ValueError(f"{self.format!r} is no row format: there are {', '.join(ROW_BYTES)}")
        if self.rows < 1 or self.address <= 0 or self.address % 16:
            raise ValueError(
                f"a table of {self.rows} rows at {self.address:#x}: there must be one at least, at"
                " an address that 16 divides"
            )

    @property
    def row_bytes(self) -> int:
        return ROW_BYTES[self.format]


def pack_int4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, 144] from int8 [rows, 256] of -8 to 7 and fp16 [rows, 8]."""
    _check_parts(values, scales, torch.int8, torch.float16)
    if int(values.min()) < -8 or int(values.max()) > 7:
        raise ValueError(f"int4 values run from {values.min()} to {values.max()}, not -8 to 7")
    halves = (values + 8).view(torch.uint8)
    packed = halves[:, 0::2] | halves[:, 1::2] << 4
    return torch.cat((packed, scales.contiguous().view(torch.uint8)), 1)


def pack_fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, 264] from e4m3 [rows, 256] and E8M0 as uint8 [rows, 8]."""
    _check_parts(values, scales, torch.float8_e4m3fn, torch.uint8)
    return torch.cat((values.contiguous().view(torch.uint8), scales), 1)


def _check_parts(
    values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    rows = len(values)
    shapes = (tuple(values.shape), tuple(scales.shape))
    if shapes != ((rows, VALUES), (rows, VALUES // GROUP)) or not rows:
        raise ValueError(f"rows have {VALUES} values and {VALUES // GROUP} scales, not {shapes}")
    if values.dtype != dtype or scales.dtype != scale_dtype:
        raise ValueError(
            f"values must be {dtype} with scales in {scale_dtype}, not {values.dtype} with"
            f" {scales.dtype}"
        )


def unpack(rows: torch.Tensor, format: str) -> torch.Tensor:
    """float32 [n, 256] from uint8 [n, row bytes]: the dense reference."""
    if format == "int4":
        packed, tail = rows[:, :128].int(), rows[:, 128:]
        values = torch.stack((packed & 15, packed >> 4), 2).flatten(1).float() - 8
        scales = tail.contiguous().view(torch.float16).float()
    else:
        values = rows[:, :256].contiguous().view(torch.float8_e4m3fn).float()
        exponents = rows[:, 256:].double()
        scales = torch.where(exponents == 255, torch.nan, 2.0 ** (exponents - 127)).float()
    return (values.unflatten(1, (-1, GROUP)) * scales.unsqueeze(2)).flatten(1)


def lookup(ids: torch.Tensor, table: RowTable, dtype: torch.dtype) -> torch.Tensor:
    """[.., 256] in `dtype` (float32, float16 or bfloat16): the rows with these numbers.

    ids int64 [..] on the device that is to have the rows; -1 gives zeros. A number outside the
    table is a ValueError on a CPU and a row of NaN on a GPU. Reads each row once a call from 64
    ids up.
    """
    if ids.dtype != torch.int64 or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"int64 ids give float32, float16 or bfloat16: not {ids.dtype}, {dtype}")
    flat = ids.flatten()
    if ids.device.type == "cuda" and len(flat):
        from expert_kernels import cuda

        return cuda.lookup(flat, table, dtype).view(*ids.shape, VALUES)
    if ids.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"lookup on {ids.device.type}: there are CPU and CUDA ops only")
    out = torch.zeros(len(flat), VALUES, dtype=dtype, device=ids.device)
    here = flat >= 0
    if len(flat) and (int(flat.min()) < -1 or int(flat.max()) >= table.rows):
        raise ValueError(
            f"ids run from {int(flat.min())} to {int(flat.max())}; the table has rows 0 to"
            f" {table.rows - 1}, and -1 asks for none"
        )
    if here.any():
        size = table.rows * table.row_bytes
        memory = (ctypes.c_char * size).from_address(table.address)
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(table.rows, -1)
        out[here] = unpack(rows[flat[here]], table.format).to(dtype)
    return out.view(*ids.shape, VALUES)
