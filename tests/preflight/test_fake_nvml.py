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
PROGRAM = """
import json
from preflight import Live, Needs, check, inspect
host = inspect(Live(), {})
report = check(host, Needs())
print(json.dumps({"host": host.model_dump(), "failed": [f.check for f in report.failures],
                  "fixes": {f.check: f.fix for f in report.failures}}))
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


def seen(folder: Path, values: str | None) -> dict[str, Any]:
    """What a fresh process sees through nvidia-ml-py; None: no library at all."""
    environment = dict(os.environ, PYTHONPATH=str(REPOSITORY))
    if values is not None:
        (folder / "values.txt").write_text(values)
        environment |= {
            "LD_LIBRARY_PATH": str(folder),
            "FAKE_NVML_FILE": str(folder / "values.txt"),
        }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def edited(**changed: str | None) -> str:
    """The healthy card with lines replaced, or taken away by None."""
    lines = dict(line.split(" ", 1) for line in CARD.splitlines())
    for key, value in changed.items():
        name = key.replace("gpu0_", "gpu0.")
        lines.pop(name, None)
        if value is not None:
            lines[name] = value
    return "\n".join(f"{k} {v}" for k, v in lines.items()) + "\n"


def test_a_healthy_card_is_read_through_the_true_library(library: Path) -> None:
    (card,) = seen(library, CARD)["host"]["gpus"]
    assert card["memory_total_bytes"] == 102641958912
    assert card["memory_free_bytes"] == 102641958912 - GIB
    assert (card["compute_capability"], card["pci_address"]) == ("12.0", "0000:01:00.0")
    # There is no such card in this machine's sysfs, so NVML's word on its place is taken.
    assert (card["numa_node"], card["cpus"]) == (0, "0-15")
    assert card["memory_numa_node"] is None


def test_a_lost_card_is_a_fault_and_its_facts_are_unknown(library: Path) -> None:
    found = seen(library, edited(gpu0_lost="1"))
    (card,) = found["host"]["gpus"]
    assert "lost" in card["fault"].lower() and card["memory_total_bytes"] is None
    assert "gpu-fault" in found["failed"]


def test_a_card_that_fails_with_an_unknown_error_is_a_fault(library: Path) -> None:
    (card,) = seen(library, edited(gpu0_name="!999"))["host"]["gpus"]
    assert card["fault"] and card["name"] is None


def test_what_a_card_does_not_support_is_unknown_and_no_fault(library: Path) -> None:
    found = seen(library, edited(gpu0_pcie_width=None, gpu0_mig=None))
    (card,) = found["host"]["gpus"]
    assert (card["pcie_width"], card["fault"]) == (None, None)
    assert card["mig_enabled"] is False
    assert "gpu-fault" not in found["failed"]


def test_a_card_without_memory_of_its_own_is_told_by_its_refusal(library: Path) -> None:
    found = seen(library, edited(gpu0_mem_total=None))
    assert found["host"]["gpus"][0]["memory_unified"] is True
    assert "gpu-memory-is-host-memory" in found["failed"]


def test_a_version_mismatch_is_not_a_missing_gpu(library: Path) -> None:
    found = seen(library, edited(driver="!18"))
    assert found["host"]["software"]["nvml_error_code"] == 18
    assert found["host"]["gpus"] is None
    assert "driver-library-mismatch" in found["failed"]
    assert "gpus-too-few" not in found["failed"]


def test_a_container_that_lost_its_devices_is_told_to_restart(library: Path) -> None:
    found = seen(library, edited(driver="!999"))
    assert "restart this container" in found["fixes"]["nvml-starts"]


def test_a_driver_that_is_not_loaded_is_told_by_its_code(library: Path) -> None:
    assert seen(library, edited(driver="!9"))["host"]["software"]["nvml_error_code"] == 9


def test_without_a_library_and_without_a_card_there_are_no_gpus(library: Path) -> None:
    found = seen(library, None)
    if found["host"]["software"]["nvml_error_code"] is None:
        pytest.skip("this machine has NVIDIA's own library")
    assert found["host"]["software"]["nvml_error_code"] == 12
    assert found["host"]["gpus"] == ([] if found["host"]["pci_gpus"] == [] else None)
