"""Each card by itself: alive, capable, free, healthy and unthrottled."""

from __future__ import annotations

from preflight.checks.check import (
    FAIL,
    WARN,
    Check,
    Result,
    Saw,
    Unseen,
    called,
    cards,
    gib,
    live,
    version,
)
from preflight.host import Host
from preflight.needs import Needs

OLDEST_CAPABILITY = (8, 0)
HELD_BYTES = 2 << 30
HOT_CELSIUS = 85
LOWERED_POWER = 0.9
HARDWARE = ("hardware slowdown", "hardware thermal slowdown", "hardware power brake",
            "software thermal slowdown")  # fmt: skip


def answers(host: Host, needs: Needs) -> Result:
    for gpu in cards(host, needs):
        if gpu.fault is not None:
            yield Saw(f"{called(gpu)} does not answer: {gpu.fault}")
        elif gpu.name is None and gpu.uuid is None:
            yield Unseen(f"name and UUID of {called(gpu)}")


def needs_no_recovery(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.recovery_action is None:
            yield Unseen(f"whether {called(gpu)} asks for recovery")
        elif gpu.recovery_action != "none":
            yield Saw(f"the driver asks to {gpu.recovery_action} for {called(gpu)}")


def capable(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        found = version(gpu.compute_capability)
        if found is None:
            yield Unseen(f"compute capability of {called(gpu)}")
        elif (*found, 0, 0)[:2] < OLDEST_CAPABILITY:
            yield Saw(f"{called(gpu)} {gpu.name or ''} has compute capability "
                      f"{gpu.compute_capability}, and the kernels need 8.0")  # fmt: skip


def not_sliced(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.mig_enabled is None:
            yield Unseen(f"MIG mode of {called(gpu)}")
        elif gpu.mig_enabled:
            yield Saw(f"{called(gpu)} is cut into MIG slices: a slice has a part of its memory")


def alike(host: Host, needs: Needs) -> Result:
    names = [gpu.name for gpu in live(host, needs)]
    if None in names:
        yield Unseen("the names of all cards")
    elif len(set(names)) > 1:
        yield Saw(f"different cards work at the pace of the slowest: {', '.join(map(str, names))}")


def memory_enough(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.memory_unified:
            continue
        if gpu.memory_total_bytes is None:
            yield Unseen(f"memory of {called(gpu)}")
        elif needs.gpu_bytes is not None and gpu.memory_total_bytes < needs.gpu_bytes:
            yield Saw(f"{called(gpu)} has {gib(gpu.memory_total_bytes)} and "
                      f"{gib(needs.gpu_bytes)} are needed")  # fmt: skip


def memory_of_its_own(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.memory_unified is None:
            yield Unseen(f"whether {called(gpu)} has memory of its own")
        elif gpu.memory_unified:
            yield Saw(f"{called(gpu)} {gpu.name or ''} has no memory of its own and shares the "
                      f"host's {gib(host.memory_total_bytes or 0)}")  # fmt: skip


def memory_free(host: Host, needs: Needs) -> Result:
    """Held by processes that can be seen; a holder nobody sees is the next check's."""
    for gpu in live(host, needs):
        used, processes = gpu.memory_used_bytes, gpu.processes
        if gpu.memory_unified:
            continue
        if used is None or processes is None:
            yield Unseen(f"who holds memory of {called(gpu)}")
        elif used > HELD_BYTES and processes:
            pids = ", ".join(str(p.pid) for p in processes)
            yield Saw(f"{gib(used)} of {called(gpu)} are in use, by process {pids}",
                      f"end what runs there: sudo kill {pids.replace(',', '')}")  # fmt: skip


def memory_held_by_nobody(host: Host, needs: Needs) -> Result:
    for gpu in cards(host, needs):
        used, processes = gpu.memory_used_bytes, gpu.processes
        if gpu.memory_unified or (gpu.fault and used is None):
            continue
        if used is None or processes is None:
            yield Unseen(f"who holds memory of {called(gpu)}")
        elif used > HELD_BYTES and not processes:
            yield Saw(f"{gib(used)} of {called(gpu)} are in use and no process is there to hold it")


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


def whole_memory_mapped(host: Host, needs: Needs) -> Result:
    for gpu in live(host, needs):
        if gpu.memory_unified:
            continue
        if gpu.bar1_total_bytes is None or gpu.memory_total_bytes is None:
            yield Unseen(f"BAR1 size of {called(gpu)}")
        elif gpu.bar1_total_bytes < gpu.memory_total_bytes // 2:
            yield Saw(f"BAR1 of {called(gpu)} maps {gib(gpu.bar1_total_bytes)} of "
                      f"{gib(gpu.memory_total_bytes)}: resizable BAR is off")  # fmt: skip


AREA = "gpu"
RESET = "stop what uses it, then: sudo nvidia-smi --gpu-reset -i N (if refused: reboot)"
NVML = "NVML API reference"
CHECKS = (
    Check("gpu-fault", AREA, FAIL, answers, "the card answers", f"{NVML}, errors 15, 16 and 999",
          "power the machine off and on; if it comes back: reseat or replace the card",
          must_see=True),
    Check("gpu-recovery-needed", AREA, FAIL, needs_no_recovery, "recovery action none",
          f"{NVML}, GPU recovery action", RESET),
    Check("compute-capability-too-old", AREA, FAIL, capable, "8.0 (Ampere) or newer",
          "exllamav3 README, requirements", "use a newer card", must_see=True),
    Check("mig-enabled", AREA, FAIL, not_sliced, "MIG is off", "NVIDIA MIG user guide",
          "sudo nvidia-smi -mig 0 && sudo nvidia-smi --gpu-reset"),
    Check("gpus-differ", AREA, WARN, alike, "one model of card",
          "tensor parallel ranks wait for each other", "choose equal cards with --gpus"),
    Check("gpu-memory-too-small", AREA, FAIL, memory_enough, "the bytes of the profile or plan",
          "the profile or plan", "plan again with more experts on the host or a shorter context",
          must_see=True),
    Check("gpu-memory-is-host-memory", AREA, FAIL, memory_of_its_own,
          "the card has memory of its own", "moving experts to the host frees nothing there",
          "serve without offload on this machine, or use a card with memory of its own"),
    Check("gpu-memory-held", AREA, FAIL, memory_free, "at most 2 GiB in use",
          "the plan counts on an empty card", "end the processes that nvidia-smi lists"),
    Check("gpu-memory-held-by-nobody", AREA, FAIL, memory_held_by_nobody,
          "at most 2 GiB in use without a process", "a dead context keeps its memory",
          "look for it in other containers (sudo fuser -v /dev/nvidia*); if nothing: reboot"),
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
    Check("persistence-off", AREA, WARN, persistent, "on", "NVIDIA driver persistence guide",
          "sudo nvidia-smi -pm 1"),
    Check("power-limit-lowered", AREA, WARN, full_power, "at least 90 % of the default limit",
          f"{NVML}, power limits", "sudo nvidia-smi -pl DEFAULT"),
    Check("clocks-throttled", AREA, WARN, unthrottled, "no thermal or hardware slowdown",
          f"{NVML}, clocks event reasons", "check the fans, the air flow and the power cables"),
    Check("gpu-hot", AREA, WARN, cool, "below 85 C before any load",
          "cards slow down from about 87 C", "check the fans and the air flow"),
    Check("bar1-small", AREA, WARN, whole_memory_mapped, "BAR1 maps the card's memory",
          "PCI Express resizable BAR", "switch on Above 4G Decoding and Resizable BAR in the "
          "firmware (for data-centre cards: large BAR)"),
)  # fmt: skip
