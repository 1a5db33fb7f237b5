"""Public bug reports that preflight owns: each leads to the finding that would have caught it."""

import re
from pathlib import Path
from typing import Any

import pytest
from broken_machines import (
    ARENA,
    DOCKER,
    FAULTS,
    H200,
    KUBECTL,
    NO_IPC_LOCK,
    TWO,
    host_with,
    limits,
    needs_for,
    refused,
    status,
)
from cases import text_of
from machines import machine

from preflight.host import Host, Measured
from preflight.nearest import host_memory_nodes
from preflight.placement import Home, prove
from preflight.probes.kernel_log import memory_kills
from preflight.report import Finding, check
from preflight.witness.understand import understand

GIB = 1 << 30


def finding(host: Host, name: str, **needs: Any) -> Finding:
    report = check(host, needs_for(TWO, **needs))
    (found,) = [f for f in report.findings if f.check == name]
    return found


def test_B004_pinning_is_tried_at_the_planned_size(shared: Path) -> None:
    assert "CPU tensor must be pinned" in text_of(shared, "B004")
    measured = Measured(trial_asked_bytes=ARENA, trial_registered_bytes=GIB)
    host = host_with(TWO, {}).model_copy(update={"measured": measured})
    assert "1.0 GiB of 64.0 GiB" in finding(host, "trial-registration-failed").saw


def test_B007_wsl_is_refused_with_its_reason(shared: Path) -> None:
    assert understand(text_of(shared, "B007")).software.wsl is True
    host = host_with(TWO, {"read /proc/sys/kernel/osrelease": "5.15.0-microsoft-standard-WSL2"})
    assert finding(host, "wsl").severity == "fail"


def test_B008_the_wsl_limit_is_the_hosts_and_not_gpu_memory(shared: Path) -> None:
    assert "WDDM/WSL2 lock-pool limit" in text_of(shared, "B008")
    host = host_with(TWO, {"read /proc/sys/kernel/osrelease": "6.6.0-microsoft-standard-WSL2"})
    found = finding(host, "wsl")
    assert "0.5 GiB can be pinned" in found.saw and "not memlock or GPU memory" in (found.fix or "")


def test_B011_many_registrations_need_many_mappings(shared: Path) -> None:
    limit = re.search(r"vm.max_map_count = (\d+)", text_of(shared, "B011"))
    assert limit
    host = host_with(TWO, {"read /proc/sys/vm/max_map_count": limit.group(1)})
    found = finding(host, "max-map-count-low", registrations=4608 * 13)
    assert "79,904" in found.saw
    assert "vm.max_map_count=" in (found.fix or "")


def test_B012_a_containers_64_mb_of_locked_memory(shared: Path) -> None:
    assert "64 MB (or 64 KB)" in text_of(shared, "B012")
    for size in (64 << 20, 64 << 10):
        mine = status(capabilities=NO_IPC_LOCK, nodes="0-1")
        edits = {"read /proc/self/limits": limits(str(size)), "read /proc/self/status": mine}
        found = finding(host_with(TWO, edits), "memlock-low")
        assert "--ulimit memlock=-1" in (found.fix or "")


def test_B013_the_groups_limit_counts_all_ranks_and_the_kill_is_read(shared: Path) -> None:
    text = text_of(shared, "B013")
    (kill,) = memory_kills(text)
    assert kill == (
        "VLLM::Worker_TP (its control group was full: anon-rss 3.0 GiB, shmem-rss 143.2 GiB)"
    )
    edits = {"read /sys/fs/cgroup/memory.max": str(587 * GIB)}
    peak = 4 * 143 * GIB + 189 * GIB
    found = finding(host_with(TWO, edits), "cgroup-memory-short", load_peak_bytes=peak)
    assert "587.0 GiB" in found.saw and "761.0 GiB" in found.saw


@pytest.mark.parametrize("name", ["B014", "B015", "B016", "B017"])
def test_a_refused_memory_policy_asks_for_sys_nice(shared: Path, name: str) -> None:
    told = understand(text_of(shared, name)).limits.memory_policy
    assert told == "operation not permitted"
    found = finding(host_with(TWO, {"trial memory-policy": told}), "memory-policy-refused")
    assert "SYS_NICE" in (found.fix or "")


def test_B017_no_program_is_needed_to_pin() -> None:
    for source in Path(__file__).resolve().parents[2].glob("preflight/**/*.py"):
        assert '"numactl"' not in source.read_text(), source


@pytest.mark.parametrize("name", ["B016", "B018"])
def test_a_binding_that_only_claims_to_work_is_disproved(shared: Path, name: str) -> None:
    assert re.search("success|other node", text_of(shared, name))
    maps = "7f0000000000 default anon=1024 N0=1024 kernelpagesize_kB=4\n"
    (placed,) = prove(maps, [Home("rank 1", 0x7F0000000000, 4 << 20, 1)])
    assert not placed.proved and "4,194,304 B on node 0" in placed.sentence


def test_B020_gpu_memory_nodes_are_not_counted(shared: Path) -> None:
    nodes = understand(text_of(shared, "B020")).numa_nodes
    assert len(nodes) == 9
    filled = [n.model_copy(update={"memory_total_bytes": 480 * GIB}) for n in nodes[:2]]
    assert [n.index for n in host_memory_nodes(Host(numa_nodes=tuple(filled)))] == [0]


@pytest.mark.parametrize("name", ["B022", "B023"])
def test_a_hang_of_two_ranks_is_a_finding_with_a_remedy(shared: Path, name: str) -> None:
    assert "hang" in text_of(shared, name)
    measured = Measured(all_reduce="no answer within 20 s", disk_read_bytes_per_second=5e9)
    host = host_with(TWO, {}).model_copy(update={"measured": measured})
    assert "NCCL_P2P_DISABLE=1" in (finding(host, "all-reduce-hangs").fix or "")


def test_B023_iommu_and_acs_together_are_reported(shared: Path) -> None:
    assert "IOMMU/ACS" in text_of(shared, "B023")
    host = host_with(TWO, FAULTS["peer-traffic-hangs"].edits)
    assert "NCCL hangs" in finding(host, "peer-traffic-hangs").saw


def test_B024_acs_of_the_ports_above_is_read_from_their_configuration(shared: Path) -> None:
    assert "ACS redirects peer traffic" in text_of(shared, "B024")
    host = host_with(TWO, FAULTS["acs-redirect"].edits)
    assert (host.gpus or ())[0].bridges[0].acs_redirect is True  # type: ignore[index]
    assert "0000:00:01.0" in finding(host, "acs-redirect").saw


def test_B025_cards_of_two_sockets_are_a_warning_with_its_price(shared: Path) -> None:
    assert "different sockets" in text_of(shared, "B025")
    found = [f for f in check(machine("two-rtx-pro-6000")).warnings
             if f.check == "gpus-on-different-nodes"]  # fmt: skip
    assert "1.17 to 1.51" in found[0].saw


def test_B041_docker_that_loses_devices_is_found_before(shared: Path) -> None:
    told = understand(text_of(shared, "B041"))
    assert told.software.nvml_error_code == 999
    edits = {DOCKER: [0, "24.0|systemd|/var/lib/docker"], "names /etc/cdi": []}
    assert "daemon-reload" in finding(host_with(TWO, edits), "docker-loses-devices").saw


def test_B042_the_missing_toolkit_is_named_in_dockers_own_words(shared: Path) -> None:
    assert "could not select device driver" in text_of(shared, "B042")
    host = host_with(TWO, {"run nvidia-ctk --version": refused(2, "no such file")})
    found = finding(host, "container-toolkit-missing")
    assert "could not select device driver" in found.saw
    assert "nvidia-container-toolkit" in (found.fix or "")


def test_B043_bus_nodes_and_driver_are_counted_and_privileged_is_never_asked_for(
    shared: Path,
) -> None:
    assert "--privileged" in text_of(shared, "B043")
    host = host_with(TWO, FAULTS["gpus-missing-from-driver"].edits)
    assert (
        "3 cards on the PCI bus, 2 in the driver" in finding(host, "gpus-missing-from-driver").saw
    )
    hidden = host_with(TWO, {"names /dev": ["null"]})
    assert "never --privileged" in (finding(hidden, "gpu-device-node-missing").fix or "")


def test_B044_a_card_that_left_the_bus_without_an_xid(shared: Path) -> None:
    host = host_with(TWO, {"run dmesg": [0, text_of(shared, "B044")]})
    assert "0000:b3:00 has fallen off the bus" in finding(host, "gpu-off-the-bus").saw


@pytest.mark.parametrize("name", ["B049", "B050"])
def test_unified_memory_is_unknown_to_nvml_and_no_place_to_offload_from(
    shared: Path, name: str
) -> None:
    assert "unified memory" in text_of(shared, name)
    host = host_with(H200, {f"nvml nvmlDeviceGetMemoryInfo gpu0 {0x02000028}": refused(3, "N/A")})
    assert (host.gpus or ())[0].memory_total_bytes is None
    assert host.memory_total_bytes
    report = check(host, needs_for(H200))
    assert "gpu-memory-is-host-memory" in {f.check for f in report.failures}


def test_B052_a_kubelet_older_than_the_pool_is_told_to_restart(shared: Path) -> None:
    pages = re.search(r"HugePages_Total:\s+(\d+)", text_of(shared, "B052"))
    assert pages
    pool = "read /sys/kernel/mm/hugepages/hugepages-2048kB"
    host = host_with(
        TWO,
        {
            f"{pool}/nr_hugepages": pages.group(1),
            f"{pool}/free_hugepages": pages.group(1),
            KUBECTL: [0, '{"hugepages-1Gi":"0","hugepages-2Mi":"0","memory":"520Gi"}'],
            "names /var/lib/kubelet": ["config.yaml"],
        },
    )  # fmt: skip
    found = finding(host, "kubelet-huge-pages-stale", deployment="kubernetes",
                    huge_page_bytes=2 << 20, pinned_bytes_by_node={})  # fmt: skip
    assert "8.0 GiB" in found.saw and "systemctl restart kubelet" in (found.fix or "")


def test_B054_a_group_that_allows_no_huge_page_is_found_before_the_bus_error(shared: Path) -> None:
    assert "Bus error" in text_of(shared, "B054")
    fault = FAULTS["cgroup-huge-pages-short"]
    host = host_with(TWO, fault.edits)
    assert "SIGBUS" in finding(host, "cgroup-huge-pages-short", **fault.needs).saw
