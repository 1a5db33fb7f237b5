"""The true nvidia-ml-py over a library that answers from a text file: no GPU is needed.

fake_nvml.c is compiled once; a card's file says what it answers, and which NVML error it gives.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
GIB = 1 << 30
# Every text of values in turn, through one process: the library reads its file at each call.
PROGRAM = """
import json, os, resource, sys
from pathlib import Path
from preflight import Live, Needs, check, inspect
found = []
for values in json.load(sys.stdin):
    Path(os.environ["FAKE_NVML_FILE"]).write_text(values)
    host = inspect(Live(), {})
    report = check(host, Needs())
    found.append({"host": host.model_dump(), "failed": [f.check for f in report.failures],
                  "fixes": {f.check: f.fix for f in report.failures}})
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss: it still counts the process that started this one.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({"found": found, "peak_kib": int(status["VmHWM"].split()[0]),
                  "cpu_seconds": used.ru_utime + used.ru_stime}))
"""
CARD = """driver 580.95.05
nvml 13.580.95.05
cuda 13000
count 1
gpu0.name NVIDIA RTX PRO 6000 Blackwell Workstation Edition
gpu0.uuid GPU-00000000-0000-0000-0000-000000000000
gpu0.bus 00000000:01:00.0
gpu0.mem_total 102641958912
gpu0.mem_used 0x40000000
gpu0.numa 0
gpu0.cpus ffff
gpu0.pcie_gen 5
gpu0.pcie_width 16
gpu0.cc 12.0
gpu0.mig 0
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled libnvidia-ml.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler: CI must have one for the fake NVML library")
        pytest.skip("no C compiler for the fake NVML library (apt install gcc)")
    folder = tmp_path_factory.mktemp("nvml")
    out = folder / "libnvidia-ml.so.1"
    build = [compiler, "-shared", "-fPIC", "-w", "-o", str(out), str(HERE / "fake_nvml.c")]
    subprocess.run(build, check=True)
    return folder


def edited(**changed: str | None) -> str:
    """The healthy card with lines replaced, or taken away by None."""
    lines = dict(line.split(" ", 1) for line in CARD.splitlines())
    for key, value in changed.items():
        name = key.replace("gpu0_", "gpu0.")
        lines.pop(name, None)
        if value is not None:
            lines[name] = value
    return "\n".join(f"{k} {v}" for k, v in lines.items()) + "\n"


CASES = {
    "healthy": CARD,
    "lost": edited(gpu0_lost="1"),
    "unknown error": edited(gpu0_name="!999"),
    "not supported": edited(gpu0_pcie_width=None, gpu0_mig=None),
    "no memory": edited(gpu0_mem_total=None),
    "mismatch": edited(driver="!18"),
    "devices gone": edited(driver="!999"),
    "no driver": edited(driver="!9"),
}


def run(values: list[str], **environment: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=dict(os.environ, PYTHONPATH=str(REPOSITORY), **environment),
        input=json.dumps(values),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def seen(library: Path) -> dict[str, dict[str, Any]]:
    """Case -> what a process sees through nvidia-ml-py."""
    values = str(library / "values.txt")
    found = run(list(CASES.values()), LD_LIBRARY_PATH=str(library), FAKE_NVML_FILE=values)["found"]
    return dict(zip(CASES, found, strict=True))


Seen = dict[str, dict[str, Any]]


def test_a_healthy_card_is_read_through_the_true_library(seen: Seen) -> None:
    (card,) = seen["healthy"]["host"]["gpus"]
    assert card["memory_total_bytes"] == 102641958912
    assert card["memory_free_bytes"] == 102641958912 - GIB
    assert (card["compute_capability"], card["pci_address"]) == ("12.0", "0000:01:00.0")
    # There is no such card in this machine's sysfs, so NVML's word on its place is taken.
    assert (card["numa_node"], card["cpus"]) == (0, "0-15")
    assert card["memory_numa_node"] is None


def test_a_lost_card_is_a_fault_and_its_facts_are_unknown(seen: Seen) -> None:
    (card,) = seen["lost"]["host"]["gpus"]
    assert "error 15" in card["fault"] or "lost" in card["fault"].lower()
    assert card["memory_total_bytes"] is None
    assert "gpu-fault" in seen["lost"]["failed"]


def test_a_card_that_fails_with_an_unknown_error_is_a_fault(seen: Seen) -> None:
    (card,) = seen["unknown error"]["host"]["gpus"]
    assert card["fault"] and card["name"] is None


def test_what_a_card_does_not_support_is_unknown_and_no_fault(seen: Seen) -> None:
    (card,) = seen["not supported"]["host"]["gpus"]
    assert (card["pcie_width"], card["fault"]) == (None, None)
    assert card["mig_enabled"] is False
    assert "gpu-fault" not in seen["not supported"]["failed"]


def test_a_card_without_memory_of_its_own_is_told_by_its_refusal(seen: Seen) -> None:
    assert seen["no memory"]["host"]["gpus"][0]["memory_unified"] is True
    assert "gpu-memory-is-host-memory" in seen["no memory"]["failed"]


def test_a_version_mismatch_is_not_a_missing_gpu(seen: Seen) -> None:
    assert seen["mismatch"]["host"]["software"]["nvml_error_code"] == 18
    assert seen["mismatch"]["host"]["gpus"] is None
    assert "driver-library-mismatch" in seen["mismatch"]["failed"]
    assert "gpus-too-few" not in seen["mismatch"]["failed"]


def test_a_container_that_lost_its_devices_is_told_to_restart(seen: Seen) -> None:
    assert "restart this container" in seen["devices gone"]["fixes"]["nvml-starts"]


def test_a_driver_that_is_not_loaded_is_told_by_its_code(seen: Seen) -> None:
    assert seen["no driver"]["host"]["software"]["nvml_error_code"] == 9


def test_without_library_and_card_there_are_none_in_5_s_and_60_mb(tmp_path: Path) -> None:
    """Processor time, so that a busy machine does not fail it; imports count too."""
    ran = run([""], FAKE_NVML_FILE=str(tmp_path / "unused"))
    (found,) = ran["found"]
    assert ran["cpu_seconds"] < 5
    assert ran["peak_kib"] * 1024 < 60e6
    if found["host"]["software"]["nvml_error_code"] is not None:
        assert found["host"]["software"]["nvml_error_code"] == 12
        assert found["host"]["gpus"] == ([] if found["host"]["pci_gpus"] == [] else None)
