"""What this process may take: locked memory, mappings, shared memory, files, CPUs."""

from __future__ import annotations

from preflight.checks.check import FAIL, WARN, Check, Result, Saw, Unseen, gib, version
from preflight.counted import counted
from preflight.host import Host
from preflight.looking import ids
from preflight.needs import Needs

UNLIMITED = -1
OTHER_MAPPINGS = 20_000
PIN_CAP_BYTES = 2 << 30
REGISTRATION_CAP_BYTES = 512 << 30
WSL_PIN_BYTES = 512 << 20
OPEN_FILES = 8192
CPUS_PER_CARD = 4


def _size(limit: int) -> str:
    return gib(limit) if limit >= 1 << 28 else f"{limit >> 10:,} KiB"


def may_lock(host: Host, needs: Needs) -> Result:
    hard, exempt = host.limits.memlock_hard_bytes, host.limits.ipc_lock
    if needs.device == "cpu" or exempt:
        return
    if hard is None:
        yield Unseen("the limit of locked memory")
    elif hard != UNLIMITED and hard < needs.pinned_bytes:
        if exempt is None:
            yield Unseen("whether this process has IPC_LOCK")
        else:
            yield Saw(f"{_size(hard)} may be locked and {gib(needs.pinned_bytes)} are to be pinned")


def locks_without_asking(host: Host, needs: Needs) -> Result:
    soft, hard = host.limits.memlock_soft_bytes, host.limits.memlock_hard_bytes
    if needs.device == "cpu" or host.limits.ipc_lock:
        return
    if soft is None or hard is None:
        yield Unseen("the limits of locked memory")
        return
    raisable = hard == UNLIMITED or hard >= needs.pinned_bytes
    if raisable and soft != UNLIMITED and soft < needs.pinned_bytes:
        yield Saw(f"the soft limit of locked memory is {_size(soft)}, below the "
                  f"{gib(needs.pinned_bytes)} to pin; the hard limit allows it")  # fmt: skip


def mappings_enough(host: Host, needs: Needs) -> Result:
    most, wanted = host.limits.max_map_count, needs.registrations + OTHER_MAPPINGS
    if most is None:
        yield Unseen("vm.max_map_count")
    elif most < wanted:
        yield Saw(f"vm.max_map_count is {most:,}; {needs.registrations:,} registrations and the "
                  f"engine take {wanted:,}",
                  f"sudo sysctl vm.max_map_count={max(1_048_576, 2 * wanted)}")  # fmt: skip


def kernel_pins_in_one(host: Host, needs: Needs) -> Result:
    found = version(host.software.kernel)
    if needs.device == "cpu":
        return
    if found is None:
        yield Unseen("the kernel's version")
    elif (6, 11) <= found[:2] <= (6, 13):
        largest = needs.largest_registration_bytes
        if largest is None or largest > PIN_CAP_BYTES:
            said = "of unknown size" if largest is None else f"of {gib(largest)}"
            yield Saw(f"kernel {host.software.kernel} pins at most 2 GiB at once and the plan has "
                      f"registrations {said}")  # fmt: skip


def registration_possible(host: Host, needs: Needs) -> Result:
    if needs.device == "cpu":
        return
    largest = needs.largest_registration_bytes
    if largest is None:
        yield Unseen("the size of the largest registration")
    elif largest >= REGISTRATION_CAP_BYTES:
        yield Saw(f"the plan pins {gib(largest)} in one registration, which the driver refuses")


def not_wsl(host: Host, needs: Needs) -> Result:
    if needs.device == "cpu":
        return
    if host.software.wsl is None:
        yield Unseen("whether this is WSL")
    elif host.software.wsl and needs.pinned_bytes > WSL_PIN_BYTES:
        yield Saw(f"this is WSL ({host.software.kernel}), where about 0.5 GiB can be pinned and "
                  f"{gib(needs.pinned_bytes)} are needed")  # fmt: skip


def shared_memory_enough(host: Host, needs: Needs) -> Result:
    size = host.limits.shm_bytes
    if size is None:
        yield Unseen("/dev/shm")
    elif size < needs.shm_bytes:
        yield Saw(
            f"/dev/shm holds {_size(size)} and the ranks exchange up to {gib(needs.shm_bytes)}"
        )


def files_enough(host: Host, needs: Needs) -> Result:
    soft = host.limits.open_files_soft
    if soft is None:
        yield Unseen("the limit of open files")
    elif soft != UNLIMITED and soft < OPEN_FILES:
        yield Saw(f"{soft:,} files may be open; the engine takes up to {OPEN_FILES:,}")


def _fed(needs: Needs, wanted: int) -> str:
    return f"{wanted} keep {counted(max(1, needs.gpus), 'card')} fed"


def quota_enough(host: Host, needs: Needs) -> Result:
    quota, wanted = host.limits.cpu_quota, CPUS_PER_CARD * max(1, needs.gpus)
    if host.limits.cgroup_version is None:
        yield Unseen("the control group's CPU quota")
    elif quota is not None and quota < wanted:
        yield Saw(f"the control group allows {quota:g} CPUs; {_fed(needs, wanted)}")


def cpus_enough(host: Host, needs: Needs) -> Result:
    ours, wanted = ids(host.limits.cpus_allowed), CPUS_PER_CARD * max(1, needs.gpus)
    if needs.device == "cpu":
        return
    if ours is None:
        yield Unseen("the CPUs this process may use")
    elif len(ours) < wanted:
        yield Saw(f"{counted(len(ours), 'CPU')} allowed; {_fed(needs, wanted)}")


AREA = "limits"
CHECKS = (
    Check("memlock-low", AREA, FAIL, may_lock, "hard limit >= bytes to pin, or IPC_LOCK",
          "getrlimit(2); containers inherit 64 KiB or 8 MiB from their daemon",
          "docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity in the service, or "
          "'* - memlock unlimited' in /etc/security/limits.conf", must_see=True),
    Check("memlock-soft-low", AREA, WARN, locks_without_asking, "soft limit >= bytes to pin",
          "getrlimit(2)", "ulimit -l unlimited"),
    Check("max-map-count-low", AREA, FAIL, mappings_enough, "registrations + 20,000",
          "each registration is a mapping; the default is 65,530",
          "sudo sysctl vm.max_map_count=1048576"),
    Check("kernel-pin-limit", AREA, FAIL, kernel_pins_in_one, "2 GiB a pin on kernels 6.11 to 6.13",
          "Linux 6.11 to 6.13, pin_user_pages; repaired in 6.14",
          "boot another kernel, or plan with chunks of at most 1 GiB"),
    Check("registration-too-large", AREA, FAIL, registration_possible, "below 512 GiB each",
          "cudaHostRegister fails from 512 GiB on", "plan with smaller chunks"),
    Check("wsl", AREA, FAIL, not_wsl, "not WSL, or at most 0.5 GiB to pin", "WSL issue 14078",
          "run on Linux itself: the limit is Windows', not memlock or GPU memory"),
    Check("shm-small", AREA, FAIL, shared_memory_enough, "1 GiB", "a container's default is 64 MiB",
          "docker run --shm-size 8g, shm_size: 8gb in compose, or an emptyDir in memory"),
    Check("open-files-low", AREA, WARN, files_enough, "8,192", "getrlimit(2)", "ulimit -n 65536"),
    Check("cpu-quota-low", AREA, WARN, quota_enough, "4 CPUs a card", "cpu.max of each group above",
          "raise the container's CPU limit (--cpus, or resources.limits.cpu)"),
    Check("cpus-few", AREA, WARN, cpus_enough, "4 CPUs a card", "/proc/self/status",
          "give the machine or the container more CPUs"),
)  # fmt: skip
