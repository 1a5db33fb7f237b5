"""The health of each card: errors in its memory, its power, its clocks, its temperature."""

from __future__ import annotations

from preflight.checks.check import FAIL, WARN, Check, Result, Saw, Unseen, called, live
from preflight.host import Host
from preflight.needs import Needs

HOT_CELSIUS = 85
LOWERED_POWER = 0.9
HARDWARE = ("hardware slowdown", "hardware thermal slowdown", "hardware power brake",
            "software thermal slowdown")  # fmt: skip


def needs_no_recovery(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.recovery_action is None:
            yield Unseen(f"whether {called(gpu)} asks for recovery")
        elif gpu.recovery_action != "none":
            yield Saw(f"the driver asks to {gpu.recovery_action} for {called(gpu)}")


def no_ecc_errors(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.ecc_enabled is None or (gpu.ecc_enabled and gpu.ecc_uncorrected_errors is None):
            yield Unseen(f"ECC errors of {called(gpu)}")
        elif gpu.ecc_uncorrected_errors:
            yield Saw(f"{called(gpu)} has {gpu.ecc_uncorrected_errors} uncorrected memory errors "
                      "since the driver was loaded")  # fmt: skip


def ecc_settled(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.ecc_enabled is None or gpu.ecc_enabled_pending is None:
            yield Unseen(f"ECC mode of {called(gpu)}")
        elif gpu.ecc_enabled != gpu.ecc_enabled_pending:
            word = "on" if gpu.ecc_enabled_pending else "off"
            yield Saw(f"ECC of {called(gpu)} turns {word} at its next reset: memory size changes")


def pages_settled(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.retired_pages_pending is None:
            yield Unseen(f"retired pages of {called(gpu)}")
        elif gpu.retired_pages_pending:
            yield Saw(f"{called(gpu)} has memory pages to retire at its next reset")


def rows_settled(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.remapped_rows_pending is None:
            yield Unseen(f"remapped rows of {called(gpu)}")
        elif gpu.remapped_rows_pending:
            yield Saw(f"{called(gpu)} has memory rows to remap at its next reset")


def rows_remapped(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.remapped_rows_failed is None:
            yield Unseen(f"remapped rows of {called(gpu)}")
        elif gpu.remapped_rows_failed:
            yield Saw(f"{called(gpu)} could not remap a broken memory row")


def fabric_ready(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.fabric is None:
            yield Unseen(f"the NVSwitch fabric of {called(gpu)}")
        elif gpu.fabric in ("not started", "in progress"):
            yield Saw(f"the NVSwitch fabric of {called(gpu)} is {gpu.fabric}: CUDA fails with "
                      "error 802")  # fmt: skip


def persistent(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.persistence is None:
            yield Unseen(f"persistence mode of {called(gpu)}")
        elif not gpu.persistence:
            yield Saw(f"persistence mode of {called(gpu)} is off: the driver unloads when idle")


def full_power(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        now, full = gpu.power_limit_milliwatts, gpu.power_limit_default_milliwatts
        if now is None or full is None:
            yield Unseen(f"power limit of {called(gpu)}")
        elif now < LOWERED_POWER * full:
            yield Saw(f"{called(gpu)} is limited to {now // 1000} W of {full // 1000} W",
                      f"sudo nvidia-smi -i {gpu.index} -pl {full // 1000}")  # fmt: skip


def unthrottled(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.throttle_reasons is None:
            yield Unseen(f"throttle reasons of {called(gpu)}")
        elif held := [reason for reason in gpu.throttle_reasons if reason in HARDWARE]:
            yield Saw(f"{called(gpu)} slows its clocks now: {', '.join(held)}")


def cool(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.temperature_celsius is None:
            yield Unseen(f"temperature of {called(gpu)}")
        elif gpu.temperature_celsius >= HOT_CELSIUS:
            yield Saw(f"{called(gpu)} is at {gpu.temperature_celsius} C before any load")


AREA = "gpu"
NVML = "NVML API reference"
RESET = "stop what uses it, then: sudo nvidia-smi --gpu-reset -i N (if refused: reboot)"
CHECKS = (
    Check("gpu-recovery-needed", AREA, FAIL, needs_no_recovery, "recovery action none",
          f"{NVML}, GPU recovery action", RESET),
    Check("ecc-errors", AREA, FAIL, no_ecc_errors, "0", f"{NVML}, volatile uncorrected errors",
          RESET),
    Check("ecc-change-pending", AREA, WARN, ecc_settled, "current and pending mode agree",
          f"{NVML}, nvmlDeviceGetEccMode", RESET),
    Check("retired-pages-pending", AREA, WARN, pages_settled, "none pending",
          "NVIDIA dynamic page retirement guide", RESET),
    Check("remapped-rows-pending", AREA, WARN, rows_settled, "none pending",
          "NVIDIA GPU memory error management guide", RESET),
    Check("remapped-rows-failed", AREA, FAIL, rows_remapped, "no failure",
          "NVIDIA GPU memory error management guide", "replace the card: it meets the RMA rule"),
    Check("fabric-not-ready", AREA, FAIL, fabric_ready, "completed, or no NVSwitch",
          "Fabric Manager user guide",
          "sudo systemctl start nvidia-fabricmanager (its version must be the driver's)"),
    Check("persistence-off", AREA, WARN, persistent, "on", "NVIDIA driver persistence guide",
          "sudo nvidia-smi -pm 1"),
    Check("power-limit-lowered", AREA, WARN, full_power, "at least 90 % of the default limit",
          f"{NVML}, power limits", "sudo nvidia-smi -pl DEFAULT"),
    Check("clocks-throttled", AREA, WARN, unthrottled, "no thermal or hardware slowdown",
          f"{NVML}, clocks event reasons", "check the fans, the air flow and the power cables"),
    Check("gpu-hot", AREA, WARN, cool, "below 85 C before any load",
          "cards slow down from about 87 C", "check the fans and the air flow"),
)  # fmt: skip
