"""Runs inside the two-node guest: `appliance tune` itself, as root, on a kernel that obeys or not.

Every line is something that was tried there. Undo is held against every byte that was there before.
"""

import ctypes
import resource
import subprocess
import sys
from pathlib import Path

PLAN = "/plan.json"
THP = Path("/sys/kernel/mm/transparent_hugepage")
POOLS = [
    Path(f"/sys/devices/system/node/node{n}/hugepages/hugepages-2048kB/nr_hugepages")
    for n in (0, 1)
]
KERNEL = [
    Path("/proc/sys/vm/swappiness"), Path("/proc/sys/kernel/numa_balancing"),
    Path("/proc/sys/vm/zone_reclaim_mode"), Path("/proc/sys/vm/max_map_count"),
    THP / "enabled", THP / "defrag", *POOLS,
]  # fmt: skip
LASTING = [
    Path("/etc/sysctl.d/90-moe-appliance.conf"), Path("/etc/tmpfiles.d/moe-appliance.conf"),
    Path("/etc/security/limits.d/90-moe-appliance.conf"),
]  # fmt: skip
THEIRS = "# the operator's own\nvm.swappiness = 35\n"
CAP_IPC_LOCK, PR_CAPBSET_DROP = 14, 24
failed = 0


def told(what: str, right: bool, detail: object = "") -> None:
    global failed
    failed += not right
    print(f"{'ok  ' if right else 'FAIL'} {what} {detail}", flush=True)


def tune(*words: str, before: object = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "appliance.cli", "tune", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=before
    )  # fmt: skip


def all_bytes() -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.exists() else None for path in (*KERNEL, *LASTING)}


def changed(before: dict[str, bytes | None]) -> dict[str, str]:
    now = all_bytes()
    return {
        Path(p).name if "node" not in p else p.split("/")[5]: (now[p] or b"gone").decode().strip()
        for p in now
        if now[p] != before[p]
    }


def without_locked_memory() -> None:
    """As a service without IPC_LOCK: 64 KiB, as dockerd hands it down."""
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)


def prepare() -> None:
    (THP / "enabled").write_text("never")
    (THP / "defrag").write_text("always")
    KERNEL[0].write_text("60")
    LASTING[0].parent.mkdir(parents=True)
    LASTING[0].write_text(THEIRS)


def shown() -> None:
    before = all_bytes()
    done = tune("--plan", PLAN)
    print(done.stdout, end="")
    told(
        "shown: swappiness, THP and its defrag",
        done.returncode == 0
        and all(
            name in done.stdout
            for name in (
                "vm/swappiness: 60 would become 1",
                "enabled: never would become madvise",
                "defrag: always would become madvise",
            )
        ),
        done.stderr[-200:],
    )
    told("to show changes nothing", changed(before) == {}, changed(before))


def for_this_boot() -> None:
    before = all_bytes()
    done = tune("--plan", PLAN, "--apply")
    told("--apply makes them", done.returncode == 0, changed(before))
    made = all_bytes()
    again = tune("--plan", PLAN, "--apply")
    told(
        "a second --apply has nothing to do",
        "nothing to change" in again.stdout and all_bytes() == made,
        again.stdout.strip()[-120:],
    )
    undone = tune("--undo")
    told(
        "--undo puts back every byte",
        undone.returncode == 0 and changed(before) == {},
        changed(before),
    )


def for_good() -> None:
    before = all_bytes()
    done = tune(
        "--plan", PLAN, "--huge-pages", "--apply", "--for-good", before=without_locked_memory
    )
    after = changed(before)
    told(
        "--huge-pages reserves each node's own",
        done.returncode == 0 and {"node0", "node1"} <= after.keys(),
        after,
    )
    told(
        "memlock is a line for the next login",
        "memlock unlimited" in (LASTING[2].read_text() if LASTING[2].exists() else ""),
        done.stdout.strip()[-150:],
    )
    # As a boot does: the kernel's defaults, then the files. A loop stands in for systemd-tmpfiles.
    KERNEL[0].write_text("60")
    for pool in POOLS:
        pool.write_text("0")
    subprocess.run(["/bin/busybox", "sysctl", "-q", "-p", str(LASTING[0])], check=True)
    for line in LASTING[1].read_text().splitlines():
        if line.startswith("w "):
            _, path, *_, value = line.split(maxsplit=6)
            Path(path).write_text(value)
    told(
        "the files written for good make the same at a boot",
        changed(before) == after,
        changed(before),
    )
    undone = tune("--undo")
    told(
        "--undo puts back every byte, the operator's own file too",
        undone.returncode == 0 and changed(before) == {} and LASTING[0].read_text() == THEIRS,
        changed(before) or undone.stderr[-200:],
    )


def too_many() -> None:
    before = all_bytes()
    taken = POOLS[1].read_text()
    limit = tune("--plan", "/huge.json", "--huge-pages", "--apply")
    told(
        "a kernel without so many pages is a sentence",
        limit.returncode == 1 and "no more to give" in limit.stderr,
        limit.stderr.strip()[-230:],
    )
    told(
        "undo after a half-made change",
        tune("--undo").returncode == 0 and changed(before) == {} and POOLS[1].read_text() == taken,
        changed(before),
    )


prepare()
for part in (shown, for_this_boot, for_good, too_many):
    part()
sys.exit(1 if failed else 0)
