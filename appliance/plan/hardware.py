"""GPUs and hosts by name, with sources: for sizing without a machine and for predictions.

Rates are peaks that vendors publish, tensor rates dense BF16 with FP32 accumulation; what a kernel
gets of them is in predict.py. Memory is what nvidia-smi reports where somebody recorded it, else
the nominal size, of which a card shows about half a percent less. A card without a source we could
check is not in the table: its speeds stay unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from appliance.errors import UsageError

GB, GIB, MIB = 10**9, 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One card. Every word of `title` is in NVML's name for it.

    `memory_from`: measured (reported by nvidia-smi, and where) or nominal. `rates_from`: the
    vendor's document with memory and tensor rates; none of them was measured here.
    """

    key: str
    title: str
    memory_bytes: int
    memory_bytes_per_second: float
    tensor_flops: float
    pcie_generation: int
    compute_capability: str
    memory_from: str
    rates_from: str
    link: Literal["pcie", "c2c"] = "pcie"

    @property
    def source(self) -> str:
        return f"memory {self.memory_from}; rates: {self.rates_from}"


_NOMINAL = "nominal"
GPUS = (
    GpuModel(
        "rtx-pro-6000", "RTX PRO 6000 Blackwell", 97_887 * MIB, 1792 * GB, 503e12, 5, "12.0",
        "measured, 97,887 MiB on the reference cards", "NVIDIA RTX Blackwell PRO white paper",
    ),
    GpuModel(
        "rtx-5090", "GeForce RTX 5090", 32 * GIB, 1792 * GB, 209e12, 5, "12.0",
        _NOMINAL, "NVIDIA RTX Blackwell white paper",
    ),
    GpuModel(
        "rtx-4090", "GeForce RTX 4090", 24_564 * MIB, 1008 * GB, 165e12, 4, "8.9",
        "measured, 24,564 MiB in a public nvidia-smi log", "NVIDIA Ada white paper",
    ),
    GpuModel(
        "rtx-3090", "GeForce RTX 3090", 24 * GIB, 936 * GB, 71e12, 4, "8.6",
        _NOMINAL, "NVIDIA Ampere GA102 white paper",
    ),
    GpuModel(
        "rtx-6000-ada", "RTX 6000 Ada", 48 * GIB, 960 * GB, 364e12, 4, "8.9",
        _NOMINAL, "NVIDIA RTX 6000 Ada data sheet",
    ),
    GpuModel(
        "l40s", "L40S", 46_068 * MIB, 864 * GB, 362e12, 4, "8.9",
        "measured, 46,068 MiB with ECC in a public nvidia-smi log", "NVIDIA L40S data sheet",
    ),
    GpuModel(
        "a100-80g", "A100 SXM4 80GB", 81_920 * MIB, 2039 * GB, 312e12, 4, "8.0",
        "measured, 81,920 MiB in a public nvidia-smi log", "NVIDIA A100 data sheet, SXM",
    ),
    GpuModel(
        "h100", "H100 80GB HBM3", 81_559 * MIB, 3350 * GB, 989e12, 5, "9.0",
        "measured, 81,559 MiB in a public nvidia-smi log", "NVIDIA H100 data sheet, SXM",
    ),
    GpuModel(
        "h200", "H200", 143_771 * MIB, 4800 * GB, 989e12, 5, "9.0",
        "measured by us, 143,771 MiB", "NVIDIA H200 data sheet, SXM",
    ),
    GpuModel(
        "gh200", "GH200", 96 * GIB, 4000 * GB, 989e12, 5, "9.0",
        _NOMINAL, "NVIDIA GH200 data sheet, 96 GB HBM3", "c2c",
    ),
    GpuModel(
        "b200", "B200", 180 * GIB, 8000 * GB, 2250e12, 5, "10.0",
        _NOMINAL, "NVIDIA HGX B200 data sheet",
    ),
)  # fmt: skip
# NVLink-C2C, NVIDIA GH200 data sheet: 900 GB/s in both directions, 450 one way.
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
        "workstation", "Threadripper PRO 9000 WX, 8 channels", 1, 2048 * GIB, 5,
        "AMD product page: 2 TB, PCIe 5.0",
    ),
    HostModel(
        "epyc-1p", "EPYC 9005, one socket, 12 channels", 1, 6144 * GIB, 5,
        "AMD EPYC 9005 data sheet: 6 TB a socket, PCIe 5.0",
    ),
    HostModel(
        "epyc-2p", "EPYC 9005, two sockets", 2, 12288 * GIB, 5,
        "AMD EPYC 9005 data sheet: 6 TB a socket, PCIe 5.0",
    ),
    HostModel(
        "xeon-2p", "Xeon 6700P, two sockets", 2, 8192 * GIB, 5,
        "Intel product page: 4 TB a socket, PCIe 5.0",
    ),
    HostModel(
        "desktop", "AM5 or LGA1851 desktop, 2 channels", 1, 256 * GIB, 5,
        "board manuals: 4 x 64 GB, PCIe 5.0",
    ),
)  # fmt: skip


def hardware_lines() -> Iterator[str]:
    """Every card and host that `size` knows, a row each, with where its figures come from."""
    yield f"{'card':<14}{'memory':>10}{'memory rate':>13}{'BF16':>13}  link        source"
    for card in GPUS:
        link = "NVLink-C2C" if card.link == "c2c" else f"PCIe {card.pcie_generation}"
        yield (
            f"{card.key:<14}{card.memory_bytes / GIB:>6.1f} GiB"
            f"{card.memory_bytes_per_second / GB:>8,.0f} GB/s{card.tensor_flops / 1e12:>6,.0f} "
            f"TFLOPS  {link:<10}  {card.source}"
        )
    yield f"{'host':<14}{'memory':>10}{'nodes':>13}  source"
    for box in HOSTS:
        yield (
            f"{box.key:<14}{box.max_memory_bytes / GIB:>6,.0f} GiB{box.numa_nodes:>13}  "
            f"{box.title}; {box.source}"
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
