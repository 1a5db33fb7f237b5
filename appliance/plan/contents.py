"""What a checkpoint holds, by role, to the byte: of any package, one we can serve or not."""

from __future__ import annotations

from appliance.checkpoint.model import Checkpoint

GIB = 1 << 30


def contents_lines(checkpoint: Checkpoint) -> list[str]:
    """A line a role, largest first, and their sum, which is the size of all tensors."""
    sizes: dict[str, int] = {}
    for layer in checkpoint.layers:
        role = "draft experts" if layer.draft else "routed experts"
        sizes[role] = sizes.get(role, 0) + layer.size_bytes
    for table in checkpoint.tables:
        role = f"lookup tables ({table.format})"
        sizes[role] = sizes.get(role, 0) + table.size_bytes
    for part in checkpoint.dense:
        role = part.role.replace("_", " ")
        sizes[role] = sizes.get(role, 0) + part.size_bytes
    rows = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    lines = [_row(role, size) for role, size in (*rows, ("sum", sum(sizes.values())))]
    return [f"{checkpoint.model_type}, experts stored as {checkpoint.quantisation}", *lines]


def _row(role: str, size: int) -> str:
    return f"  {role:<24}{size:>18,} B {size / GIB:>9.2f} GiB"
