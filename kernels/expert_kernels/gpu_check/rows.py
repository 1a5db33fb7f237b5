"""Lookups against the dense reference: formats, homes, dtypes, few, many, repeated, captured."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from expert_kernels import lookup
from expert_kernels.gpu_check.compare import Facts


def random_rows(rows: int, format: str, seed: int = 0) -> torch.Tensor:
    """uint8 [rows, row bytes] on the CPU, every scale finite."""
    generator = torch.Generator().manual_seed(seed)
    if format == "int4":
        values = torch.randint(-8, 8, (rows, 256), dtype=torch.int8, generator=generator)
        return lookup.pack_int4(values, torch.randn(rows, 8, generator=generator).half())
    wide = torch.randn(rows, 256, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.randint(120, 132, (rows, 8), dtype=torch.uint8, generator=generator)
    return lookup.pack_fp8(wide, scales)


def lookups() -> Iterator[Facts]:
    for format in lookup.ROW_BYTES:
        count = 4099
        rows = random_rows(count, format)
        dense = lookup.unpack(rows, format).cuda()
        homes = (rows.pin_memory(), rows.cuda())
        for asked in (1, 5, 63, 64, 1000, 20_000):
            ids = torch.randint(0, count, (asked,), device="cuda")
            ids[asked // 2] = -1
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                expected = torch.where(ids[:, None] >= 0, dense[ids.clamp(min=0)], 0.0).to(dtype)
                same = []
                for home in homes:
                    table = lookup.RowTable(home.data_ptr(), count, format)
                    same.append(torch.equal(lookup.lookup(ids, table, dtype), expected))
                yield {"ok": all(same), "format": format, "ids": asked, "host_device": same}
        bad = torch.tensor([0, count, -2, 1], device="cuda")
        out = lookup.lookup(bad, table, torch.float32)
        right = out[1:3].isnan().all() and torch.equal(out[[0, 3]], dense[:2])
        yield {"ok": bool(right), "format": format, "case": "numbers outside the table"}
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            again = lookup.lookup(ids, table, torch.float32)
        ids.copy_(torch.randint(0, 50, ids.shape, device="cuda"))
        again.zero_()
        captured.replay()
        yield {"ok": torch.equal(again, dense[ids]), "format": format, "case": "graph"}
