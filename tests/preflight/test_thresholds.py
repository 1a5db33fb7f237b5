"""Each numeric threshold at its edge: the value that is still fine, and the next that is not."""

from typing import Any

import pytest
from broken_machines import (
    ARENA,
    CARD,
    FAULTS,
    GIB,
    H200,
    MEMORY_V2,
    NO_IPC_LOCK,
    PCI,
    PORT,
    TWO,
    acs,
    below,
    host_with,
    limits,
    meminfo,
    memory,
    needs_for,
    status,
)

from preflight.report import check

KERNEL = "read /proc/sys/kernel/osrelease"
POWER = "nvml nvmlDeviceGetEnforcedPowerLimit gpu0"
CAPABILITY = "nvml nvmlDeviceGetCudaComputeCapability gpu0"
MEMORY = f"nvml nvmlDeviceGetMemoryInfo gpu0 {MEMORY_V2}"
NODE0 = "read /sys/devices/system/node/node0"
TOTAL = 102641958912


def locked(size: int) -> dict[str, Any]:
    mine = status(capabilities=NO_IPC_LOCK, nodes="0-1")
    return {"read /proc/self/limits": limits(str(size)), "read /proc/self/status": mine}


def driver(version: str) -> dict[str, Any]:
    return {
        "nvml nvmlSystemGetDriverVersion": version,
        "nvml nvmlSystemGetNVMLVersion": f"13.{version}",
        "read /proc/driver/nvidia/version": f"NVRM version: Kernel Module  {version}  x\n",
    }


def pages(count: int) -> dict[str, Any]:
    pool = f"{NODE0}/hugepages/hugepages-2048kB"
    return {f"{pool}/free_hugepages": str(count), f"{pool}/nr_hugepages": str(count)}


def pool(count: int) -> dict[str, Any]:
    folder = "read /sys/kernel/mm/hugepages/hugepages-2048kB"
    return {f"{folder}/free_hugepages": str(count), f"{folder}/nr_hugepages": str(count)}


def hugetlb(size: int) -> dict[str, Any]:
    name = "hugetlb.2MB.max"
    return {"names /sys/fs/cgroup": [name], f"read /sys/fs/cgroup/{name}": str(size)}


def overcommit(limit: int) -> dict[str, Any]:
    """One GiB is promised already, and the load takes 80."""
    return {
        "read /proc/sys/vm/overcommit_memory": "2",
        "read /proc/meminfo": meminfo(CommitLimit=limit),
    }


COMPAT = "names /usr/local/cuda/compat"
HUGE = {"huge_page_bytes": 2 << 20}
# check, edits that are still fine, edits that are not, needs
EDGES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("memlock-low", locked(ARENA), locked(ARENA - 1), {}),
    ("shm-small", {"space /dev/shm": [GIB, 0]}, {"space /dev/shm": [GIB - 1, 0]}, {}),
    ("open-files-low", {"read /proc/self/limits": limits("unlimited", "8192")},
     {"read /proc/self/limits": limits("unlimited", "8191")}, {}),
    ("max-map-count-low", {"read /proc/sys/vm/max_map_count": "20064"},
     {"read /proc/sys/vm/max_map_count": "20063"}, {}),
    ("driver-too-old", driver("580.65.06"), driver("579.99.99"), {}),
    ("compute-capability-too-old", {CAPABILITY: [8, 0]}, {CAPABILITY: [7, 5]}, {}),
    ("gpu-memory-too-small", {}, {}, {"gpu_bytes": TOTAL}),
    ("gpu-memory-held-by-nobody", {MEMORY: memory(TOTAL, 2 * GIB)},
     {MEMORY: memory(TOTAL, 2 * GIB + 1)}, {}),
    ("power-limit-lowered", {POWER: 540_000}, {POWER: 539_999}, {}),
    ("gpu-hot", {"nvml nvmlDeviceGetTemperature gpu0 0": 84},
     {"nvml nvmlDeviceGetTemperature gpu0 0": 85}, {}),
    ("bar1-small", {"nvml nvmlDeviceGetBAR1MemoryInfo gpu0": {"bar1Total": TOTAL // 2}},
     {"nvml nvmlDeviceGetBAR1MemoryInfo gpu0": {"bar1Total": TOTAL // 2 - 1}}, {}),
    ("pcie-replays", {"nvml nvmlDeviceGetPcieReplayCounter gpu0": 1000},
     {"nvml nvmlDeviceGetPcieReplayCounter gpu0": 1001}, {}),
    ("swap-in-use", {"read /proc/meminfo": meminfo(SwapTotal=16, SwapFree=15)},
     {"read /proc/meminfo": meminfo(SwapTotal=16, SwapFree=14)}, {}),
    ("host-memory-short", {"read /proc/meminfo": meminfo(MemFree=64, MemAvailable=64)},
     {"read /proc/meminfo": meminfo(MemFree=63, MemAvailable=63)}, {"load_peak_bytes": ARENA}),
    ("host-memory-cached", {"read /proc/meminfo": meminfo(MemFree=64)},
     {"read /proc/meminfo": meminfo(MemFree=63)}, {}),
    ("load-peak-short", {"read /proc/meminfo": meminfo(MemAvailable=80)},
     {"read /proc/meminfo": meminfo(MemAvailable=79)}, {}),
    ("cgroup-memory-short", {"read /sys/fs/cgroup/memory.max": str(80 * GIB)},
     {"read /sys/fs/cgroup/memory.max": str(80 * GIB - 1)}, {}),
    ("cpu-quota-low", {"read /sys/fs/cgroup/cpu.max": "800000 100000"},
     {"read /sys/fs/cgroup/cpu.max": "799999 100000"}, {}),
    ("cpus-few", {"read /proc/self/status": status(cpus="0-7", nodes="0-1")},
     {"read /proc/self/status": status(cpus="0-6", nodes="0-1")}, {}),
    ("node-huge-pages-short", pages(32768), pages(32767), HUGE),
    ("node-memory-short",
     {f"{NODE0}/meminfo": f"Node 0 MemTotal: {1 << 28} kB\nNode 0 MemFree: {64 << 20} kB\n"},
     {f"{NODE0}/meminfo": f"Node 0 MemTotal: {1 << 28} kB\nNode 0 MemFree: {(64 << 20) - 1} kB\n"},
     {}),
    ("model-disk-full", {"space /tmp": [400 * GIB, 330 * GIB]},
     {"space /tmp": [400 * GIB, 330 * GIB - 1]}, {}),
    ("cache-disk-full", {"space /tmp": [400 * GIB, 10 * GIB]},
     {"space /tmp": [400 * GIB, 10 * GIB - 1]}, {"model_disk_bytes": None}),
    ("docker-disk-full", {"space /var/lib/docker": [400 * GIB, 40 * GIB]},
     {"space /var/lib/docker": [400 * GIB, 40 * GIB - 1]}, {}),
    ("huge-pages-idle", pool(512), pool(513), {}),
    ("cgroup-huge-pages-short", {**pages(40000), **hugetlb(ARENA)},
     {**pages(40000), **hugetlb(ARENA - 1)}, HUGE),
    ("overcommit-strict", overcommit(81), overcommit(80), {}),
    ("cuda-compat-older-than-driver", {COMPAT: ["libcuda.so.580.1.1"]},
     {COMPAT: ["libcuda.so.579.9.9"]}, {}),
    ("kernel-old", {KERNEL: "5.15.0-1-generic"}, {KERNEL: "5.14.21"}, {}),
    ("kernel-pin-limit", {KERNEL: "6.10.14"}, {KERNEL: "6.11.0-8"},
     {"largest_registration_bytes": (2 << 30) + 1}),
    ("kernel-pin-limit", {KERNEL: "6.14.0-15"}, {KERNEL: "6.13.9"},
     {"largest_registration_bytes": (2 << 30) + 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fine", "wrong", "needs"), EDGES, ids=lambda v: str(v)[:24])
def test_the_edge_is_fine_and_one_step_further_is_not(
    name: str, fine: dict[str, Any], wrong: dict[str, Any], needs: dict[str, Any]
) -> None:
    if name == "gpu-memory-too-small":
        wrong = {MEMORY: memory(TOTAL - 1, 0)}
    found = [
        name in {f.check for f in check(host_with(TWO, edits), needs_for(TWO, **needs)).findings}
        for edits in (fine, wrong)
    ]
    assert found == [False, True]


@pytest.mark.parametrize(("size", "fails"), [((2 << 30), False), ((2 << 30) + 1, True)])
def test_a_kernel_with_a_pin_limit_is_fine_for_small_pins(size: int, fails: bool) -> None:
    host = host_with(TWO, {KERNEL: "6.12.0"})
    report = check(host, needs_for(TWO, largest_registration_bytes=size))
    assert ("kernel-pin-limit" in {f.check for f in report.failures}) is fails


@pytest.mark.parametrize(("cpus", "warns"), [("0-62", False), ("0-63", True)])
def test_hidden_nodes_are_suspected_from_64_cpus_on(cpus: str, warns: bool) -> None:
    report = check(host_with(H200, {"read /sys/devices/system/cpu/online": cpus}), needs_for(H200))
    assert ("nodes-hidden" in {f.check for f in report.warnings}) is warns


@pytest.mark.parametrize(("size", "fails"), [((512 << 30) - 1, False), (512 << 30, True)])
def test_the_driver_refuses_registrations_from_512_gib_on(size: int, fails: bool) -> None:
    report = check(host_with(TWO, {}), needs_for(TWO, largest_registration_bytes=size))
    assert ("registration-too-large" in {f.check for f in report.failures}) is fails


def test_free_reserved_pages_are_memory_for_an_arena_in_them() -> None:
    edits = {
        "read /proc/meminfo": meminfo(MemFree=20, MemAvailable=20),
        **pages(32768),
        **pool(32768),
    }
    reserved = check(host_with(TWO, edits), needs_for(TWO, **HUGE))
    assert "host-memory-short" not in {f.check for f in reserved.failures}
    without = check(host_with(TWO, edits), needs_for(TWO))
    assert "host-memory-short" in {f.check for f in without.failures}


def test_inner_ports_of_a_switch_have_no_link_to_judge() -> None:
    card = CARD[TWO]
    edits = {
        f"target {PCI}/{card}": below(PORT, "0000:02:00.0", "0000:03:00.0", card=card),
        **{f"binary {PCI}/{port}/config": acs(0) for port in ("0000:02:00.0", "0000:03:00.0")},
    }
    assert check(host_with(TWO, edits), needs_for(TWO)).findings == ()


def test_a_container_without_gpus_asks_for_no_gpu_tools() -> None:
    edits = {**FAULTS["container-toolkit-missing"].edits, "names /etc/cdi": []}
    needs = needs_for(TWO, device="cpu", gpus=0, gpu_bytes=None)
    assert check(host_with(TWO, edits), needs).findings == ()


def test_ipc_lock_lifts_the_limit_of_locked_memory() -> None:
    edits = {"read /proc/self/limits": limits("65536")}
    assert check(host_with(TWO, edits), needs_for(TWO)).findings == ()


def test_wsl_may_pin_what_fits_its_half_gibibyte() -> None:
    host = host_with(TWO, FAULTS["wsl"].edits)
    small = needs_for(TWO, pinned_bytes=512 << 20, pinned_bytes_by_node={})
    assert check(host, small).failures == ()


def test_an_idle_link_at_generation_one_is_normal() -> None:
    edits = {"nvml nvmlDeviceGetCurrPcieLinkGeneration gpu0": 1}
    assert check(host_with(TWO, edits), needs_for(TWO)).findings == ()


def test_without_a_gpu_in_the_profile_no_gpu_is_asked_for() -> None:
    host = host_with(TWO, {"nvml nvmlDeviceGetCount": FAULTS["nvml-starts"].edits[
        "nvml nvmlDeviceGetCount"]})  # fmt: skip
    report = check(host, needs_for(TWO, device="cpu", gpus=0, gpu_bytes=None))
    assert report.findings == ()
