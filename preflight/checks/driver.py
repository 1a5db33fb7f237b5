"""Is the driver there, whole, new enough, and does it see every card?"""

from __future__ import annotations

from preflight.checks.check import FAIL, WARN, Check, Result, Saw, Unseen, called, cards, version
from preflight.counted import counted
from preflight.host import Host
from preflight.needs import Needs
from preflight.nvml import DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, VERSION_MISMATCH

OLDEST_DRIVER = (580,)
UNKNOWN_ERROR = 999
FIXES = {
    DRIVER_NOT_LOADED: "sudo modprobe nvidia && sudo dmesg | grep NVRM",
    LIBRARY_NOT_FOUND: "install the driver's userspace (apt install nvidia-utils-580), "
    "or start the container with --gpus all",
    UNKNOWN_ERROR: "restart this container: it lost its devices (systemctl daemon-reload does "
    "this; use CDI or the cgroupfs driver to keep them)",
}


def nvml_starts(host: Host, needs: Needs) -> Result:
    if needs.device == "cpu" or host.gpus is not None:
        return
    code = host.software.nvml_error_code
    if host.software.nvml_error is None:
        yield Unseen("whether the NVIDIA driver answers")
    elif code != VERSION_MISMATCH:
        there = len(host.pci_gpus or ())
        cards_text = (
            f"{there} NVIDIA card{'s' * (there != 1)} on the PCI bus" if there else "a card"
        )
        text = f"{cards_text}, but the driver does not answer: {host.software.nvml_error}"
        yield Saw(text, FIXES.get(code or 0))


def versions_match(host: Host, needs: Needs) -> Result:
    soft = host.software
    if soft.nvml_error_code == VERSION_MISMATCH:
        library = f"library {soft.nvml}" if soft.nvml else "the library"
        module = f"kernel module {soft.kernel_module}" if soft.kernel_module else "kernel module"
        yield Saw(f"{library} does not match the loaded {module}")
    elif cards(host, needs):
        if soft.nvml is None or soft.kernel_module is None:
            yield Unseen("the versions of the driver's library and kernel module")
        elif not soft.nvml.endswith(soft.kernel_module):
            yield Saw(f"library {soft.nvml} does not match kernel module {soft.kernel_module}")


def driver_new_enough(host: Host, needs: Needs) -> Result:
    if not cards(host, needs):
        return
    found = version(host.software.driver)
    if found is None:
        yield Unseen("the driver's version")
    elif found < OLDEST_DRIVER:
        yield Saw(f"driver {host.software.driver} is older than {OLDEST_DRIVER[0]}")


def nouveau(host: Host, needs: Needs) -> Result:
    if needs.device == "cpu" or not host.pci_gpus:
        return
    if host.software.nouveau_loaded is None:
        yield Unseen("whether the nouveau module is loaded")
    elif host.software.nouveau_loaded:
        yield Saw("the nouveau kernel module is loaded and keeps NVIDIA's driver off the cards")


def uvm(host: Host, needs: Needs) -> Result:
    if not cards(host, needs):
        return
    if host.software.uvm_loaded is None:
        yield Unseen("whether the nvidia_uvm module is loaded")
    elif not host.software.uvm_loaded:
        yield Saw("the nvidia_uvm module is not loaded: no CUDA program can start")


def cuda_compat(host: Host, needs: Needs) -> Result:
    compat, driver = version(host.software.cuda_compat), version(host.software.driver)
    if host.software.cuda_compat is None or not cards(host, needs):
        return
    if compat is None or driver is None:
        yield Unseen("whether the CUDA compatibility library matches the driver")
    elif compat[0] < driver[0]:
        yield Saw(
            f"/usr/local/cuda/compat holds libcuda {host.software.cuda_compat}, older than the "
            f"driver {host.software.driver}: CUDA fails with error 803 where it is used"
        )


def enough_cards(host: Host, needs: Needs) -> Result:
    if needs.device == "cpu":
        return
    if host.gpus is None:
        if host.software.nvml_error is None:
            yield Unseen("how many GPUs there are")
        return
    named = set(needs.gpu_uuids)
    here = {gpu.uuid for gpu in host.gpus}
    lost = _hidden(host) and not _in_container(host)  # gpus-missing-from-driver says it
    if len(host.gpus) < needs.gpus and not lost:
        yield Saw(f"{counted(len(host.gpus), 'GPU')}, needed: {needs.gpus}")
    elif named - here:
        yield Saw(f"the plan names {', '.join(sorted(named - here))}, which is not in this machine")


def driver_sees_every_card(host: Host, needs: Needs) -> Result:
    if needs.device == "cpu" or not host.gpus:
        return
    if host.pci_gpus is None:
        yield Unseen("the NVIDIA cards on the PCI bus")
        return
    hidden = _hidden(host)
    if hidden and _in_container(host):
        yield Unseen(f"whether {', '.join(hidden)} is kept from this container or from the driver")
    elif hidden:
        yield Saw(
            f"{counted(len(host.pci_gpus), 'card')} on the PCI bus, {len(host.gpus)} in the "
            f"driver: {', '.join(hidden)} is missing"
        )


def _hidden(host: Host) -> list[str]:
    """Cards of the bus that the driver does not count; none where an address is not known."""
    seen = {gpu.pci_address for gpu in host.gpus or ()}
    return [] if None in seen else [each for each in host.pci_gpus or () if each not in seen]


def _in_container(host: Host) -> bool:
    """Whether cards may be withheld on purpose: sysfs shows a container all of them."""
    return host.software.container not in (None, "none")


def device_nodes(host: Host, needs: Needs) -> Result:
    for gpu in cards(host, needs):
        if gpu.device_node is None:
            yield Unseen(f"the device node of {called(gpu)}")
        elif not gpu.device_node:
            yield Saw(f"{called(gpu)} has no /dev/nvidia* node here")


AREA = "driver"
CHECKS = (
    Check("nvml-starts", AREA, FAIL, nvml_starts, "NVML initialises", "NVML reference, nvmlInit",
          "sudo modprobe nvidia && nvidia-smi", must_see=True),
    Check("driver-library-mismatch", AREA, FAIL, versions_match,
          "library and kernel module have one version", "NVML API reference, error 18",
          "reboot, so that the installed kernel module is loaded (or: sudo rmmod nvidia_uvm "
          "nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia)"),
    Check("driver-too-old", AREA, FAIL, driver_new_enough, "580 or newer",
          "CUDA 13.0 release notes, driver versions", "sudo apt install nvidia-driver-580"),
    Check("nouveau-loaded", AREA, FAIL, nouveau, "nouveau is not loaded",
          "NVIDIA driver installation guide",
          "echo 'blacklist nouveau' | sudo tee /etc/modprobe.d/no-nouveau.conf && "
          "sudo update-initramfs -u && sudo reboot"),
    Check("uvm-module-missing", AREA, FAIL, uvm, "nvidia_uvm is loaded",
          "NVIDIA driver README, kernel modules", "sudo nvidia-modprobe -u -c 0"),
    Check("cuda-compat-older-than-driver", AREA, WARN, cuda_compat,
          "no compatibility library older than the driver", "CUDA compatibility guide, error 803",
          "sudo rm -r /usr/local/cuda/compat && sudo ldconfig"),
    Check("gpus-too-few", AREA, FAIL, enough_cards, "as many GPUs as the profile or plan asks for",
          "the profile or plan", "put the cards in, pass them to the container (--gpus all), or "
          "plan for fewer with --gpus", must_see=True),
    Check("gpus-missing-from-driver", AREA, FAIL, driver_sees_every_card,
          "every NVIDIA card on the PCI bus is in the driver", "sysfs against NVML",
          "sudo dmesg | grep NVRM; power the machine off and on; then reseat the card"),
    Check("gpu-device-node-missing", AREA, FAIL, device_nodes, "/dev/nvidiaN for every card",
          "/proc/driver/nvidia/gpus/*/information", "sudo nvidia-modprobe -c 0, or restart the "
          "container with --gpus all (never --privileged: it brings in broken cards too)"),
)  # fmt: skip
