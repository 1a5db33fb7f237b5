"""Rows of a table in host memory by random number, as a share of what the link can do."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from expert_kernels import lookup
from expert_kernels.bench_gpu.timing import Facts, alone, median_us

TABLE_BYTES = 4 << 30
RECORDS_A_SECOND = 49e6  # at most, of any size under 1 KiB, over 4 GiB: FACTS section 3


def measure(repeats: int) -> Iterator[Facts]:
    """The ceiling is the slower of two: 49 million records a second, or a copy of the bytes."""
    yield {"predicted": {"rows_a_second": 40e6, "of_which_half_repeated": "twice as many"}}
    memory = torch.empty(TABLE_BYTES, dtype=torch.uint8, pin_memory=True)
    noise = torch.randint(0, 120, (256 << 20,), dtype=torch.uint8, device="cuda")
    for start in range(0, TABLE_BYTES, len(noise)):
        memory[start : start + len(noise)].copy_(noise)
    for format, size in lookup.ROW_BYTES.items():
        rows = TABLE_BYTES // size
        table = lookup.RowTable(memory.data_ptr(), rows, format)
        for asked, distinct in ((512, 512), (8192, 8192), (65536, 65536), (65536, 16384)):
            pool = torch.randint(0, rows, (distinct,), device="cuda")
            ids = pool[torch.randint(0, distinct, (asked,), device="cuda")]
            read = len(ids.unique())
            us = median_us(lambda: lookup.lookup(ids, table, torch.bfloat16), repeats)  # noqa: B023
            target = torch.empty(read * size, dtype=torch.uint8, device="cuda")
            source = memory[: read * size]
            copy = median_us(lambda: target.copy_(source, non_blocking=True), repeats)  # noqa: B023
            floor = max(copy, read / RECORDS_A_SECOND * 1e6)
            yield {
                "format": format,
                "ids": asked,
                "distinct": read,
                "us": us,
                "rows_a_second": asked / us * 1e6,
                "records_a_second": read / us * 1e6,
                "copy_us": copy,
                "share_of_ceiling": floor / us,
            }


if __name__ == "__main__":
    sys.exit(alone(measure, "expert_kernels.bench_gpu.lookup_rows", __doc__))
