"""GPUs and hosts by name: what data sheets say, for sizing without a machine and for predictions.

Rates are peaks; what a kernel gets of them is in predict.py. Source: NVIDIA's data sheets and
product pages of each card, tensor rates dense BF16 with FP32 accumulation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from appliance.errors import UsageError

GB, GIB = 10**9, 1 << 30


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One card. Every word of `title` is in NVML's name for it."""

    key: str
    title: str
    memory_bytes: int
    memory_bytes_per_second: float
    tensor_flops: float
    pcie_generation: int
    compute_capability: str
    link: Literal["pcie", "c2c"] = "pcie"
    source: str = "NVIDIA data sheet"


# Memory: what nvidia-smi reports where we saw it (RTX PRO 6000, H200), else the nominal size.
GPUS = (
    GpuModel(
        "rtx-pro-6000", "RTX PRO 6000 Blackwell", 102_641_958_912, 1792 * GB, 503e12, 5, "12.0"
    ),
    GpuModel("rtx-pro-5000", "RTX PRO 5000 Blackwell", 48 * GIB, 1344 * GB, 294e12, 5, "12.0"),
    GpuModel("rtx-5090", "GeForce RTX 5090", 32 * GIB, 1792 * GB, 209e12, 5, "12.0"),
    GpuModel("rtx-4090", "GeForce RTX 4090", 24 * GIB, 1008 * GB, 165e12, 4, "8.9"),
    GpuModel("rtx-3090", "GeForce RTX 3090", 24 * GIB, 936 * GB, 71e12, 4, "8.6"),
    GpuModel("rtx-6000-ada", "RTX 6000 Ada", 48 * GIB, 960 * GB, 182e12, 4, "8.9"),
    GpuModel("l40s", "L40S", 48 * GIB, 864 * GB, 362e12, 4, "8.9"),
    GpuModel("a100-80g", "A100", 80 * GIB, 2039 * GB, 312e12, 4, "8.0"),
    GpuModel("h100", "H100", 80 * GIB, 3350 * GB, 989e12, 5, "9.0"),
    GpuModel("h200", "H200", 150_754_820_096, 4800 * GB, 989e12, 5, "9.0"),
    GpuModel("gh200", "GH200", 96 * GIB, 4000 * GB, 989e12, 5, "9.0", "c2c"),
    GpuModel("b200", "B200", 180 * GIB, 8000 * GB, 2250e12, 5, "10.0"),
)
# NVLink-C2C of GH200: 900 GB/s in both directions, 450 one way.
C2C_BYTES_PER_SECOND = 450 * GB


@dataclass(frozen=True, slots=True)
class HostModel:
    """A kind of machine: memory channels bound how much memory it can take and feed."""

    key: str
    title: str
    numa_nodes: int
    max_memory_bytes: int
    pcie_generation: int
    source: str


HOSTS = (
    HostModel(
        "workstation", "Threadripper PRO 9000 WX, 8 channels", 1, 2048 * GIB, 5, "AMD product page"
    ),
    HostModel("epyc-1p", "EPYC 9005, one socket, 12 channels", 1, 6144 * GIB, 5, "AMD data sheet"),
    HostModel("epyc-2p", "EPYC 9005, two sockets", 2, 12288 * GIB, 5, "AMD data sheet"),
    HostModel("xeon-2p", "Xeon 6700P, two sockets", 2, 8192 * GIB, 5, "Intel product page"),
    HostModel("desktop", "AM5 or LGA1851 desktop, 2 channels", 1, 256 * GIB, 5, "board manuals"),
)


def gpu_model(key: str) -> GpuModel:
    """By the short name used on the command line. Raises UsageError naming those there are."""
    for model in GPUS:
        if model.key == key.lower():
            return model
    raise UsageError(f"no GPU is called {key!r}; known: {', '.join(m.key for m in GPUS)}")


def host_model(key: str) -> HostModel:
    """By the short name used on the command line. Raises UsageError naming those there are."""
    for model in HOSTS:
        if model.key == key.lower():
            return model
    raise UsageError(f"no host is called {key!r}; known: {', '.join(m.key for m in HOSTS)}")


def recognise(name: str | None) -> GpuModel | None:
    """The model whose title is part of NVML's name; None for a card that is not in the table."""
    words = set(re.findall(r"[a-z0-9]+", (name or "").lower()))
    found = [m for m in GPUS if set(re.findall(r"[a-z0-9]+", m.title.lower())) <= words]
    return max(found, key=lambda m: len(m.title), default=None)
