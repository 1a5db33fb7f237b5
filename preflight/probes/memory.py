"""How much memory this machine and this process may take: meminfo, limits, control groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from preflight.answers import Unreadable
from preflight.host import Limits, Memory
from preflight.looking import Looking, keyed_kib, whole
from preflight.probes.numa import huge_pages

VM = "/proc/sys/vm"
CGROUP = "/sys/fs/cgroup"
UNLIMITED = -1
# Control groups v1 write "no limit" as the largest page-aligned long.
NO_LIMIT_V1 = 1 << 60
IPC_LOCK, SYS_NICE = 14, 23
SIZE_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


def chosen(text: str | None) -> str | None:
    """The bracketed word of `always [madvise] never`."""
    match = re.search(r"\[([^\]]+)\]", text or "")
    return match.group(1) if match else None


def memory(look: Looking) -> Memory:
    """Swap, overcommit, reclaim and the machine's huge pages."""
    info = keyed_kib(look.text("/proc/meminfo"))
    pools = "/sys/kernel/mm/hugepages"
    overcommit = {}
    for pool in huge_pages(look, pools):
        more = look.number(f"{pools}/hugepages-{pool.page_bytes // 1024}kB/nr_overcommit_hugepages")
        if more is not None:
            overcommit[pool.page_bytes] = more
    return Memory(
        swap_total_bytes=info.get("SwapTotal"),
        swap_free_bytes=info.get("SwapFree"),
        swappiness=look.number(f"{VM}/swappiness"),
        defrag=chosen(look.text("/sys/kernel/mm/transparent_hugepage/defrag")),
        overcommit=look.number(f"{VM}/overcommit_memory"),
        commit_limit_bytes=info.get("CommitLimit"),
        committed_bytes=info.get("Committed_AS"),
        zone_reclaim=look.number(f"{VM}/zone_reclaim_mode"),
        numa_balancing=look.number("/proc/sys/kernel/numa_balancing"),
        huge_pages=huge_pages(look, pools),
        huge_pages_overcommit=overcommit or None,
    )


def limits(look: Looking) -> Limits:
    """Limits of this process and of every control group above it."""
    files = _process_limits(look)
    status = _status(look)
    capabilities = int(status["CapEff"], 16) if "CapEff" in status else None
    group = _cgroup_v2(look) or _cgroup_v1(look)
    try:
        shm: int | None = look.source.space("/dev/shm").total_bytes
    except Unreadable:
        shm = None
    return Limits(
        memlock_soft_bytes=files.get("Max locked memory", (None, None))[0],
        memlock_hard_bytes=files.get("Max locked memory", (None, None))[1],
        open_files_soft=files.get("Max open files", (None, None))[0],
        open_files_hard=files.get("Max open files", (None, None))[1],
        max_map_count=look.number(f"{VM}/max_map_count"),
        shm_bytes=shm,
        cpus_allowed=status.get("Cpus_allowed_list"),
        memory_nodes_allowed=status.get("Mems_allowed_list"),
        ipc_lock=None if capabilities is None else bool(capabilities >> IPC_LOCK & 1),
        sys_nice=None if capabilities is None else bool(capabilities >> SYS_NICE & 1),
        seccomp=whole(status.get("Seccomp")),
        memory_policy=look.trial("memory-policy"),
        **group,
    )


def _process_limits(look: Looking) -> dict[str, tuple[int | None, int | None]]:
    found = {}
    for line in (look.text("/proc/self/limits") or "").splitlines():
        match = re.match(r"(Max [a-z ]+?)\s{2,}(\S+)\s+(\S+)", line)
        if match:
            found[match.group(1)] = (_limit(match.group(2)), _limit(match.group(3)))
    return found


def _limit(word: str | None) -> int | None:
    return UNLIMITED if word in ("unlimited", "max") else whole(word)


def _status(look: Looking) -> dict[str, str]:
    lines = (look.text("/proc/self/status") or "").splitlines()
    return {k: v.strip() for k, colon, v in (line.partition(":") for line in lines) if colon}


def _groups(look: Looking) -> dict[str, str]:
    """Controller -> path of this process's control group; v2 has the empty name."""
    found = {}
    for line in (look.text("/proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            found.update(dict.fromkeys(parts[1].split(","), parts[2]))
    return found


def _upwards(path: str) -> list[str]:
    """/a/b -> /a/b, /a and the root: the tightest limit of them all counts."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return ["/" + "/".join(parts[:n]) if n else "" for n in range(len(parts), -1, -1)]


def _tightest(values: list[int]) -> int | None:
    bounded = [value for value in values if value != UNLIMITED]
    return min(bounded) if bounded else (UNLIMITED if values else None)


class Level(NamedTuple):
    """One control group: its limit, and what all in it and below it use; None: it does not say."""

    max_bytes: int | None
    used_bytes: int | None
    cache_bytes: int | None

    @property
    def room_bytes(self) -> int:
        return (self.max_bytes or 0) - (self.used_bytes or 0) + (self.cache_bytes or 0)


def _fullest(levels: Sequence[Level], without: int | None) -> dict[str, int | None]:
    """Of our own group and those above it the one with the least room: a limit counts together
    with what its own group uses, neighbours' memory included. `without`: where none says one."""
    limited = [level for level in levels if level.max_bytes not in (None, UNLIMITED)]
    told = [level for level in levels if level.used_bytes is not None] or [Level(None, None, None)]
    stated = UNLIMITED if any(level.max_bytes == UNLIMITED for level in levels) else without
    found = min(limited, key=lambda level: level.room_bytes, default=None)
    if found is None:
        found = told[0]._replace(max_bytes=stated)
    return {
        "cgroup_memory_max_bytes": found.max_bytes,
        "cgroup_memory_used_bytes": found.used_bytes,
        "cgroup_memory_cache_bytes": found.cache_bytes,
    }


def _cgroup_v2(look: Looking) -> dict[str, object] | None:
    groups = _groups(look)
    if "" not in groups or "memory" in groups:
        return None
    levels: list[Level] = []
    quotas: list[float] = []
    huge: dict[int, list[int]] = {}
    seen = look.names(CGROUP) is not None
    for path in _upwards(groups[""]):
        folder = CGROUP + path
        # Above memory.high a group is not refused but held up; what is pinned cannot be reclaimed,
        # so that loading would never end.
        bounds = [_limit(look.text(f"{folder}/memory.{name}")) for name in ("max", "high")]
        levels.append(
            Level(
                _tightest([bound for bound in bounds if bound is not None]),
                look.number(f"{folder}/memory.current"),
                _cache(look, folder, "file"),
            )
        )
        quotas += _quota((look.text(f"{folder}/cpu.max") or "").split())
        for name in look.names(folder) or ():
            match = re.fullmatch(r"hugetlb\.(\d+)([KMG]B)\.max", name)
            value = _limit(look.text(f"{folder}/{name}")) if match else None
            if match and value is not None:
                size = int(match.group(1)) * SIZE_UNITS[match.group(2)]
                huge.setdefault(size, []).append(value)
    return {
        "cgroup_version": 2,
        # The root group has no memory.max: seeing it without one means nothing limits us.
        **_fullest(levels, UNLIMITED if seen else None),
        "cpu_quota": min(quotas, default=None),
        "cgroup_huge_pages_max_bytes": {s: _tightest(v) for s, v in huge.items()} or None,
    }


def _quota(words: list[str]) -> list[float]:
    quota, period = (whole(words[0]), whole(words[1])) if len(words) == 2 else (None, None)
    return [quota / period] if quota is not None and quota > 0 and period else []


def _cache(look: Looking, folder: str, name: str) -> int | None:
    """Page cache of a group, less what is shared memory: that does not give way."""
    words = (look.text(f"{folder}/memory.stat") or "").split()
    told = dict(zip(words[::2], words[1::2], strict=False))
    shared = whole(told.get("shmem" if name == "file" else "total_shmem")) or 0
    cached = whole(told.get(name))
    return None if cached is None else max(0, cached - shared)


def _cgroup_v1(look: Looking) -> dict[str, object]:
    groups = _groups(look)
    if "memory" not in groups:
        return {}
    levels = []
    for path in _upwards(groups["memory"]):
        folder = f"{CGROUP}/memory{path}"
        value = look.number(f"{folder}/memory.limit_in_bytes")
        levels.append(
            Level(
                UNLIMITED if value is not None and value >= NO_LIMIT_V1 else value,
                look.number(f"{folder}/memory.usage_in_bytes"),
                _cache(look, folder, "total_cache"),
            )
        )
    quotas = []
    for path in _upwards(groups.get("cpu", "/")):
        folder = f"{CGROUP}/cpu{path}"
        quota, period = (look.text(f"{folder}/cpu.cfs_{w}_us") for w in ("quota", "period"))
        quotas += _quota([quota or "", period or ""])
    huge = {}
    folder = f"{CGROUP}/hugetlb{groups.get('hugetlb', '').rstrip('/')}"
    for name in look.names(folder) or ():
        match = re.fullmatch(r"hugetlb\.(\d+)([KMG]B)\.limit_in_bytes", name)
        value = look.number(f"{folder}/{name}") if match else None
        if match and value is not None:
            size = int(match.group(1)) * SIZE_UNITS[match.group(2)]
            huge[size] = UNLIMITED if value >= NO_LIMIT_V1 else value
    return {
        "cgroup_version": 1,
        **_fullest(levels, None),
        "cpu_quota": min(quotas, default=None),
        "cgroup_huge_pages_max_bytes": huge or None,
    }
