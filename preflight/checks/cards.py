"""Each card by itself: alive, capable, whole and free."""

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


def answers(host: Host, needs: Needs) -> Result:
    for gpu in cards(host, needs):
        if gpu.fault is not None:
            yield Saw(f"{called(gpu)} does not answer: {gpu.fault}")
        elif gpu.name is None and gpu.uuid is None:
            yield Unseen(f"name and UUID of {called(gpu)}")


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
NVML = "NVML API reference"
CHECKS = (
    Check("gpu-fault", AREA, FAIL, answers, "the card answers", f"{NVML}, errors 15, 16 and 999",
          "power the machine off and on; if it comes back: reseat or replace the card",
          must_see=True),
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
    Check("bar1-small", AREA, WARN, whole_memory_mapped, "BAR1 maps the card's memory",
          "PCI Express resizable BAR", "switch on Above 4G Decoding and Resizable BAR in the "
          "firmware (for data-centre cards: large BAR)"),
)  # fmt: skip
