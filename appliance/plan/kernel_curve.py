"""How long one layer's experts take, by bytes and by how many of them wait in host memory.

The built-in curve was measured on an H200; `appliance calibrate` makes one on the user's GPU.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from appliance.errors import UsageError


class KernelCurve(BaseModel):
    """Measured points of one kernel on one card.

    device_points        (trellis bytes of the distinct experts, seconds), all on the device
    host_start_seconds   what the first host expert costs beside its bytes
    zero_copy_share      kernel reads of host memory as a share of the copy engine's rate
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    device_points: tuple[tuple[int, float], ...]
    host_start_seconds: float
    zero_copy_share: float = 0.93

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def device_seconds(self, size_bytes: float) -> float:
        """Seconds for experts on the device; straight lines between points and beyond the last."""
        points = self.device_points
        i = bisect_left(points, size_bytes, key=lambda point: point[0])
        if i == 0:
            return points[0][1]
        (x0, y0), (x1, y1) = points[min(i, len(points) - 1) - 1], points[min(i, len(points) - 1)]
        return y0 + (y1 - y0) * (size_bytes - x0) / (x1 - x0)

    def layer_seconds(self, device_seconds: float, host_bytes: float, rate: float) -> float:
        """Experts on the device hide under those read from the host (FACTS: h of six, 0..6)."""
        if not host_bytes:
            return device_seconds
        return max(device_seconds, self.host_start_seconds + host_bytes / rate)


# What the engine runs: docs/measurements/2026-11-30-h200-host-experts.md, experts of 5120 x 2304 at
# K = 3 (13,271,040 B), 1, 6, 12, 24, 36 and 48 distinct, all in device memory; host experts of six.
_EXPERT = 3 * 5120 * 2304 * 3 // 8
H200 = KernelCurve(
    name="expert_kernels on H200",
    device_points=(
        (_EXPERT, 58.6e-6),
        (6 * _EXPERT, 94.7e-6),
        (12 * _EXPERT, 157.6e-6),
        (24 * _EXPERT, 273.7e-6),
        (36 * _EXPERT, 403.8e-6),
        (48 * _EXPERT, 528.5e-6),
    ),
    host_start_seconds=35e-6,
)

# exllamav3's kernel, to compare with: recorded/h200-1gpu/bench/run3_b3_decode.jsonl, exl3_moe,
# experts of 7168 x 2048 at K = 3, 1, 6, 8, 12, 24 and 48 distinct; then h of six on the host.
_PEER_EXPERT = 3 * 7168 * 2048 * 3 // 8
EXL3_MOE = KernelCurve(
    name="exl3_moe on H200",
    device_points=(
        (_PEER_EXPERT, 124.4e-6),
        (6 * _PEER_EXPERT, 168.5e-6),
        (8 * _PEER_EXPERT, 216.7e-6),
        (12 * _PEER_EXPERT, 301.1e-6),
        (24 * _PEER_EXPERT, 779.8e-6),
        (48 * _PEER_EXPERT, 1169.1e-6),
    ),
    host_start_seconds=35e-6,
)


def curve_from_measurements(name: str, rows: Sequence[Mapping[str, object]]) -> KernelCurve:
    """A curve from our bench's rows: `decode` rows at rising `experts`, and `mix` rows.

    Raises UsageError where the rows are not enough.
    """
    decode = sorted((_number(r, "experts"), _number(r, "moe_vram"))
                    for r in rows if r.get("sec") == "decode")  # fmt: skip
    mixed = sorted((_number(r, "host_of_6"), _number(r, "moe_us"))
                   for r in rows if r.get("sec") == "mix" and _number(r, "host_of_6"))  # fmt: skip
    tags = {str(r["tag"]) for r in rows if r.get("sec") == "decode"}
    by_experts: dict[float, float] = {}
    for experts, seconds in decode:
        by_experts[experts] = min(seconds, by_experts.get(experts, seconds))
    if len(tags) != 1 or len(by_experts) < 2 or len(mixed) < 2:
        raise UsageError("a kernel curve needs decode rows of one shape at two sizes or more and "
                         "two mixes of host experts or more")  # fmt: skip
    (first, at_first), (last, at_last) = mixed[0], mixed[-1]
    each = (at_last - at_first) / (last - first)
    size = _trellis_bytes(tags.pop())
    return KernelCurve(
        name=name,
        device_points=tuple((int(n * size), us * 1e-6) for n, us in sorted(by_experts.items())),
        host_start_seconds=max(0.0, at_first - first * each) * 1e-6,
    )


def curve_from_json(text: str) -> KernelCurve:
    """What `appliance calibrate` wrote. Raises UsageError with one sentence."""
    try:
        curve = KernelCurve.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(f"not a kernel curve: {where}: {first['msg']}",
                         fix="run appliance calibrate again") from error  # fmt: skip
    sizes = [size for size, _ in curve.device_points]
    if len(sizes) < 2 or sizes != sorted(set(sizes)):
        raise UsageError("a kernel curve needs two points or more, at rising sizes")
    return curve


def _trellis_bytes(tag: str) -> int:
    """`7168x2048k3` -> bytes of the three trellises."""
    sizes, _, bits = tag.partition("k")
    hidden, _, inner = sizes.partition("x")
    if not (hidden.isdecimal() and inner.isdecimal() and bits.isdecimal()):
        raise UsageError(f"{tag!r} does not name a shape such as 7168x2048k3")
    return 3 * int(hidden) * int(inner) * int(bits) // 8


def _number(row: Mapping[str, object], key: str) -> float:
    value = row.get(key)
    if not isinstance(value, int | float):
        raise UsageError(f"a row of measurements has no number {key}: {dict(row)}")
    return float(value)
