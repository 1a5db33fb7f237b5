"""Facts of the recorded machines."""

from pathlib import Path

import pytest
from broken_machines import FAULTS, TWO, host_with, refused
from machines import NAMES, machine

from preflight.host import Host, Measured
from preflight.inspect import inspect
from preflight.needs import Needs
from preflight.report import check
from preflight.source import Live, Recorded, Recording

GIB = 1 << 30


def test_two_cards_have_what_the_planner_needs() -> None:
    one, two = machine("two-rtx-pro-6000").gpus or ()
    assert (one.numa_node, two.numa_node) == (0, 1)
    assert (one.cpus, two.cpus) == ("0-15", "16-31")
    assert (two.pcie_generation, two.pcie_width) == (4, 8)
    assert (two.pcie_generation_max, two.pcie_width_max) == (5, 16)
    assert one.memory_total_bytes == 102641958912
    assert one.compute_capability == "12.0"
    assert one.uuid != two.uuid


def test_the_nodes_have_cpus_and_free_memory() -> None:
    host = machine("two-rtx-pro-6000")
    assert [n.cpus for n in host.numa_nodes] == ["0-15", "16-31"]
    assert [n.distances for n in host.numa_nodes] == [(10, 21), (21, 10)]
    assert sum(n.memory_free_bytes or 0 for n in host.numa_nodes) == host.memory_free_bytes


def test_limits_are_read_and_unlimited_is_minus_one() -> None:
    limits = machine("two-rtx-pro-6000").limits
    assert limits.memlock_soft_bytes == limits.memlock_hard_bytes == -1
    assert limits.cgroup_memory_max_bytes == -1
    assert limits.max_map_count == 1048576
    assert limits.shm_bytes == 64 * GIB


def test_a_composed_machine_says_so() -> None:
    assert (machine("two-rtx-pro-6000").label or "").startswith("composed")


def test_the_only_node_of_a_machine_is_the_node_of_its_cards() -> None:
    # The firmware of this virtual machine says -1.
    (card,) = machine("h200-1gpu").gpus or ()
    assert card.numa_node == 0
    assert card.name == "NVIDIA H200"
    assert card.memory_total_bytes == 143771 << 20
    assert card.bridges == ()


def test_a_machine_without_a_card_has_none_rather_than_unknown() -> None:
    host = inspect(Live())
    if host.pci_gpus:
        pytest.skip("this machine has NVIDIA cards")
    assert host.gpus == ()
    assert host.memory_total_bytes


@pytest.mark.parametrize("name", NAMES)
def test_facts_survive_json(name: str) -> None:
    host = machine(name)
    assert Host.model_validate_json(host.model_dump_json()) == host


XML = """<?xml version="1.0" ?>
<nvidia_smi_log>
  <gpu id="00000000:81:00.0"><gpu_recovery_action>Reset</gpu_recovery_action></gpu>
  <gpu id="00000000:01:00.0"><gpu_recovery_action>None</gpu_recovery_action>
    <product_name>another name</product_name></gpu>
</nvidia_smi_log>
"""
ACTION = "nvml nvmlDeviceGetFieldValues gpu{} 230"


def test_nvidia_smi_tells_what_nvml_has_no_call_for_by_address_not_by_order() -> None:
    missing = {ACTION.format(n): refused(13, "Function Not Found") for n in (0, 1)}
    host = host_with(TWO, {**missing, "run nvidia-smi -q -x": [0, XML]})
    one, two = host.gpus or ()
    assert (one.recovery_action, two.recovery_action) == ("none", "Reset")
    assert one.name == "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"


def test_nvidia_smi_is_not_asked_twice_for_what_a_card_does_not_support() -> None:
    missing = {ACTION.format(0): refused(3, "Not Supported")}
    host = host_with(TWO, {**missing, "run nvidia-smi -q -x": [0, XML]})
    assert (host.gpus or ())[0].recovery_action is None


def test_topo_m_is_a_witness_of_the_node() -> None:
    other = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNODE\t0-15\t1\n"
    other += "GPU1\tNODE\t X \t0-15\t0\n"
    host = host_with(TWO, {"run nvidia-smi topo -m": [0, other]})
    found = [f for f in check(host).warnings if f.check == "gpu-node-witnesses-disagree"]
    assert (
        "GPU 0 (0000:01:00.0) is on node 0 for sysfs and on node 1 for nvidia-smi" in found[0].saw
    )


def test_a_card_kept_from_a_container_is_not_called_lost() -> None:
    edits = dict(FAULTS["gpus-missing-from-driver"].edits)
    edits["read /.dockerenv"] = ""
    report = check(host_with(TWO, edits))
    assert "gpus-missing-from-driver" in {f.check for f in report.unknowns}
    assert report.failures == ()
    few = check(host_with(TWO, edits), Needs(gpus=3))
    assert [f.check for f in few.failures] == ["gpus-too-few"]


def test_page_cache_of_a_control_group_gives_way() -> None:
    edits = {
        "read /sys/fs/cgroup/memory.max": str(32 * GIB),
        "read /sys/fs/cgroup/memory.current": str(30 * GIB),
        "read /sys/fs/cgroup/memory.stat": f"anon 1\nfile {29 * GIB}\nshmem {2 * GIB}\n",
    }
    host = host_with(TWO, edits)
    assert host.limits.cgroup_memory_cache_bytes == 27 * GIB
    assert "cgroup-memory-short" not in {f.check for f in check(host).failures}
    tight = check(host, Needs(load_peak_bytes=31 * GIB))
    assert "cgroup-memory-short" in {f.check for f in tight.failures}


@pytest.mark.parametrize(
    ("group", "files", "told"),
    [
        # A slice is limited, and its other services use most of it.
        ("/ml.slice/a.service", {
            "/ml.slice/memory.max": 100 * GIB, "/ml.slice/memory.current": 80 * GIB,
            "/ml.slice/a.service/memory.max": "max", "/ml.slice/a.service/memory.current": GIB,
        }, (100 * GIB, 80 * GIB)),
        # The tightest limit is not the one with the least room.
        ("/a/b", {
            "/a/memory.max": 100 * GIB, "/a/memory.current": 90 * GIB,
            "/a/b/memory.max": 50 * GIB, "/a/b/memory.current": GIB,
        }, (100 * GIB, 90 * GIB)),
        # A container that is told the host's path and sees its own group as the root.
        ("/docker/abc", {"/memory.max": 32 * GIB, "/memory.current": 2 * GIB},
         (32 * GIB, 2 * GIB)),
        # systemd's MemoryHigh: no refusal, and no end either.
        ("/a", {"/a/memory.max": "max", "/a/memory.high": 8 * GIB, "/a/memory.current": GIB},
         (8 * GIB, GIB)),
    ],
)  # fmt: skip
def test_the_group_with_the_least_room_is_told_with_what_is_used_of_it(group, files, told) -> None:
    answers = {f"read /sys/fs/cgroup{path}": str(value) for path, value in files.items()}
    own = {"read /proc/self/cgroup": f"0::{group}", "names /sys/fs/cgroup": ["memory.max"]}
    no_root = {} if "/memory.max" in files else {
        "read /sys/fs/cgroup/memory.max": None, "read /sys/fs/cgroup/memory.current": None,
    }  # fmt: skip
    limits = host_with(TWO, {**no_root, **own, **answers}).limits
    assert (limits.cgroup_memory_max_bytes, limits.cgroup_memory_used_bytes) == told


def test_measurements_stay_with_a_recording(tmp_path: Path) -> None:
    recording = Recording(Live(), tmp_path)
    inspect(recording)
    recording.measured = Measured(disk_read_bytes_per_second=5e9).model_dump()
    recording.save()
    measured = inspect(Recorded(tmp_path)).measured
    assert measured and measured.disk_read_bytes_per_second == 5e9


def test_a_folder_of_ours_is_never_looked_for_below_the_hosts_root(tmp_path: Path) -> None:
    live = Live(tmp_path / "host")
    assert live.space(str(tmp_path)).total_bytes > 0


def test_a_control_group_nobody_can_see_is_not_called_unlimited() -> None:
    host = host_with(TWO, {"names /sys/fs/cgroup": None})
    assert host.limits.cgroup_memory_max_bytes is None
    assert "cgroup-memory-short" in {f.check for f in check(host).warnings}


def test_a_virtual_disk_says_nothing_of_spinning_and_a_spinning_one_says_seconds_a_gib() -> None:
    """virtio says rotational whatever is beneath it; and a model may have 5 MiB or 300 GiB."""
    virtual = machine("two-h200")
    assert {disk.rotational for disk in virtual.disks} == {None}
    disk = virtual.disks[0].model_copy(update={"role": "model"})
    for rotational, severity in ((None, "unknown"), (True, "warn")):
        known = disk.model_copy(update={"rotational": rotational})
        found = check(virtual.model_copy(update={"disks": (known,)})).findings
        (one,) = [finding for finding in found if finding.check == "model-disk-spins"]
        assert one.severity == severity and "300 GiB" not in one.saw
    assert one.saw.endswith("is on a spinning disk: each GiB takes about 6 s to load")
