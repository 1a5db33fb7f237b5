"""Real hosts: sysfs trees, numactl and lscpu texts, control groups; each with its right answer."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from cases import text_of
from hypothesis import given
from hypothesis import strategies as st

from preflight.answers import MISSING, Source, Unreadable
from preflight.host import Gpu, Host
from preflight.inspect import inspect
from preflight.looking import ids
from preflight.nearest import host_memory_nodes, memory_nodes_near
from preflight.needs import Needs
from preflight.report import check
from preflight.witness.numactl import parse_lscpu, parse_numactl
from preflight.witness.understand import understand

MIB, GIB = 1 << 20, 1 << 30
ROOTS = {"mm/": "/sys/kernel/mm/", "node/": "/sys/devices/system/node/", "meminfo": "/proc/meminfo"}


class Tree(Source):
    """Files of a text with `### FILE path` lines; `base` stands before a relative path."""

    def __init__(self, text: str, base: str = "") -> None:
        parts = re.split(r"^### FILE (.+)\n", text, flags=re.M)[1:]
        self.files = dict(zip((self._at(p, base) for p in parts[::2]), parts[1::2], strict=True))

    @staticmethod
    def _at(path: str, base: str) -> str:
        for start, root in ROOTS.items():
            if path.startswith(start) and not base:
                return root + path[len(start) :] if start != "meminfo" else root
        return path if path.startswith("/") else base + path

    def answer(self, kind: str, *words: str) -> Any:
        if kind == "read" and words[0] in self.files:
            return self.files[words[0]]
        if kind == "names":
            start = words[0].rstrip("/") + "/"
            found = {p[len(start) :].split("/")[0] for p in self.files if p.startswith(start)}
            if found:
                return sorted(found)
        raise Unreadable(MISSING, 2)


def host(shared: Path, name: str, base: str = "") -> Host:
    return inspect(Tree(text_of(shared, name), base), {})


def found(facts: Host, **needs: Any) -> set[str]:
    report = check(facts, Needs(device="cpu", gpus=0, **needs))
    return {f.check for f in report.failures + report.warnings if "could not" not in f.saw}


def test_M001_gpu_memory_nodes_are_not_host_memory(shared: Path) -> None:
    facts = host(shared, "M001")
    assert [n.index for n in facts.numa_nodes if n.cpus] == [0, 8]
    assert {n.index for n in facts.numa_nodes if n.gpu_memory} == set(range(250, 256))
    assert [n.index for n in host_memory_nodes(facts)] == [0, 8]


def test_M002_unified_memory_is_one_node_and_no_place_for_host_experts(shared: Path) -> None:
    facts = host(shared, "M002")
    assert (len(facts.numa_nodes), facts.memory_total_bytes) == (1, 125508468 * 1024)
    card = Gpu(index=0, name="NVIDIA GB10", compute_capability="12.1", memory_unified=True)
    report = check(facts.model_copy(update={"gpus": (card,)}), Needs())
    assert "gpu-memory-is-host-memory" in {f.check for f in report.failures}


def test_M006_overlapping_cpu_maps_make_the_nodes_unknown(shared: Path) -> None:
    assert "numa-map-wrong" in found(host(shared, "M006"))


def test_M007_memory_is_taken_from_the_nearest_node_that_has_some(shared: Path) -> None:
    facts = host(shared, "M007")
    assert memory_nodes_near(facts, 0)[:2] == (5, 6)
    assert memory_nodes_near(facts, 3)[0] == 9
    assert {"node-without-memory", "node-without-cpus"} <= found(facts)


def test_M008_the_page_size_is_the_name_of_its_folder(shared: Path) -> None:
    pools = host(shared, "M008").memory.huge_pages
    assert [(p.page_bytes, p.total) for p in pools] == [(2 * MIB, 1), (16 * GIB, 1)]


def test_M009_node_ids_have_gaps_and_distances_follow_their_order(shared: Path) -> None:
    facts = host(shared, "M009")
    assert [n.index for n in facts.numa_nodes] == [0, 1, 2, 33, 34, 45, 72, 73]
    assert all(n.distances and len(n.distances) == 8 for n in facts.numa_nodes)
    assert memory_nodes_near(facts, 45)[0] == 45


@pytest.mark.parametrize(("name", "nodes"), [("M010", 4), ("M012", 4)])
def test_an_ordinary_machine_has_its_nodes(shared: Path, name: str, nodes: int) -> None:
    facts = host(shared, name)
    assert len(facts.numa_nodes) == nodes
    assert "numa-map-wrong" not in found(facts)


def test_M014_tiers_without_cpus_are_left_out(shared: Path) -> None:
    facts = host(shared, "M014")
    assert [n.index for n in host_memory_nodes(facts)] == [0, 1, 2]
    assert "node-without-cpus" in found(facts)


@pytest.mark.parametrize(
    ("name", "online", "offline"), [("M016", "1-5,8-19", "0,6,7"), ("M020", "0-63", None)]
)
def test_lscpu_lists_may_have_holes(shared: Path, name: str, online: str, offline: str) -> None:
    told = parse_lscpu(text_of(shared, name))
    assert (told.online, told.offline) == (online, offline)


def test_M017_strides_in_a_cpu_list_are_understood(shared: Path) -> None:
    told = parse_lscpu(text_of(shared, "M017"))
    assert [n.index for n in told.nodes] == [0, 2, 3]
    sizes = [len(ids(n.cpus) or ()) for n in told.nodes]
    assert sizes == [32, 16, 16] and sum(sizes) == 64


def test_M021_each_node_has_its_own_pools(shared: Path) -> None:
    facts = host(shared, "M021")
    free = [{p.page_bytes: p.free for p in n.huge_pages} for n in facts.numa_nodes]
    assert free == [{2 * MIB: 434, GIB: 0}, {2 * MIB: 449, GIB: 0}]
    wanted = {"pinned_bytes_by_node": {0: GIB}, "huge_page_bytes": 2 * MIB}
    assert "node-huge-pages-short" in found(facts, **wanted)


def test_M022_the_word_max_is_no_limit_and_the_tightest_group_counts(shared: Path) -> None:
    tree = Tree(text_of(shared, "M022"), "/sys/fs/cgroup/pod/")
    tree.files["/proc/self/cgroup"] = "0::/pod\n"
    limits = inspect(tree, {}).limits
    assert limits.cgroup_memory_max_bytes == 103079215104
    assert limits.cgroup_memory_used_bytes == 13071106048
    assert limits.cpu_quota == 48
    assert limits.cgroup_huge_pages_max_bytes == {2 * MIB: -1, GIB: -1}
    tree.files["/sys/fs/cgroup/memory.max"] = "1000000\n"
    assert inspect(tree, {}).limits.cgroup_memory_max_bytes == 1000000


def test_M022_a_huge_page_limit_of_zero_is_found(shared: Path) -> None:
    tree = Tree(text_of(shared, "M022"), "/sys/fs/cgroup/")
    tree.files |= {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/hugetlb.2MB.max": "0\n"}
    assert "cgroup-huge-pages-short" in found(inspect(tree, {}), huge_page_bytes=2 * MIB)


def test_M025_memory_on_two_of_eight_nodes(shared: Path) -> None:
    facts = understand(text_of(shared, "M025"))
    assert [n.index for n in facts.numa_nodes if n.memory_total_bytes] == [1, 5]
    assert ids(facts.numa_nodes[4].cpus) == frozenset(range(1, 96, 8))
    assert "node-without-memory" in found(facts)
    card = Gpu(index=0, name="x", uuid="y", numa_node=0)
    report = check(facts.model_copy(update={"gpus": (card,)}), Needs())
    assert "gpu-node-without-memory" in {f.check for f in report.failures}


def test_M026_a_wrapped_list_goes_on_and_only_grace_memory_counts(shared: Path) -> None:
    nodes = understand(text_of(shared, "M026")).numa_nodes
    assert ids(nodes[0].cpus) == frozenset(range(72))
    assert nodes[1].distances == (80, 10, *[255] * 7)
    assert [n.index for n in host_memory_nodes(Host(numa_nodes=nodes))] == [0]


@pytest.mark.parametrize(("name", "good"), [("M027", [0, 1]), ("M028", [0, 1])])
def test_memory_without_cpus_is_left_out(shared: Path, name: str, good: list[int]) -> None:
    facts = understand(text_of(shared, name))
    assert [n.index for n in host_memory_nodes(facts)] == good
    assert "node-without-cpus" in found(facts)


def test_M030_a_node_of_cpus_without_memory_takes_the_nearest(shared: Path) -> None:
    facts = understand(text_of(shared, "M030"))
    assert memory_nodes_near(facts, 0) == (2,)


def test_M031_a_quarter_node_is_too_small_and_its_socket_has_the_rest(shared: Path) -> None:
    facts = understand(text_of(shared, "M031"))
    assert len(facts.numa_nodes) == 8 and facts.numa_nodes[0].memory_total_bytes == 63565 * MIB
    needs = Needs(device="cpu", gpus=0, pinned_bytes_by_node={0: 100 * GIB})
    (finding,) = [f for f in check(facts, needs).failures if f.check == "node-memory-short"]
    assert "spread the arena over the nodes of the socket (0, 1, 2, 3" in (finding.fix or "")


def test_M032_edited_output_is_refused_whole(shared: Path) -> None:
    assert parse_numactl(text_of(shared, "M032")) == ()


TEXTS = ["M025", "M026", "M027", "M028", "M030", "M031"]


def same_or_unknown(damaged: str, whole: str) -> bool:
    right = {node.index: node for node in parse_numactl(whole + "\n")}
    for node in parse_numactl(damaged):
        want = right.get(node.index)
        if want is None:
            return False
        facts = ("cpus", "memory_total_bytes", "memory_free_bytes", "distances")
        if any(getattr(node, f) not in (None, getattr(want, f)) for f in facts):
            return False
    return True


@pytest.mark.parametrize("name", TEXTS)
def test_damaged_numactl_text_is_right_or_unknown(shared: Path, name: str) -> None:
    text = text_of(shared, name)
    chance = random.Random(name)
    assert parse_numactl(text.replace("\n", "\r\n")) == parse_numactl(text)
    assert parse_numactl(re.sub("^", "   ", text, flags=re.M)) == parse_numactl(text)
    for cut in chance.sample(range(len(text)), min(150, len(text))):
        assert same_or_unknown(text[:cut], text), text[:cut][-80:]
    for _ in range(40):
        lines = text.splitlines(keepends=True)
        chance.shuffle(lines)
        assert same_or_unknown("".join(lines), text)


@given(st.text(alphabet="node cpus:size free 0123456789.MB\n", max_size=200))
def test_no_text_makes_the_readers_raise(text: str) -> None:
    parse_numactl(text)
    parse_lscpu("NUMA node0 CPU(s): " + text)


def test_M033_huge_pages_of_half_a_gibibyte_are_a_size_like_any_other() -> None:
    pool = "/sys/kernel/mm/hugepages/hugepages-524288kB/"
    tree = Tree(f"### FILE {pool}nr_hugepages\n48\n### FILE {pool}free_hugepages\n31\n")
    (page,) = inspect(tree, {}).memory.huge_pages
    assert (page.page_bytes, page.total, page.free) == (512 * MIB, 48, 31)


def test_M034_a_whole_report_of_a_rented_host(shared: Path) -> None:
    facts = understand(text_of(shared, "M034"))
    assert (facts.software.driver, facts.software.cuda_driver) == ("610.43.02", "13.3")
    assert facts.software.kernel == "7.0.0-28-generic"
    assert [g.numa_node for g in facts.gpus or ()] == [0] * 4
    assert {link.path for link in facts.links} == {"NODE"}
    assert [(n.index, n.cpus) for n in facts.numa_nodes] == [
        (0, "0-47,96-143"), (1, "48-95,144-191")]  # fmt: skip
    report = check(facts, Needs())
    assert "gpu-memory-held" in {f.check for f in report.failures}
