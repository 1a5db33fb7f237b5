"""Host changes: advised where needed, made, recorded, undone."""

from pathlib import Path

import pytest
from broken_machines import FAULTS, TWO, host_with, needs_for

from preflight.report import check
from preflight.tune import Advice, Step, TuneError, advise, apply, undo

GIB = 1 << 30
SWAP = "/proc/sys/vm/swappiness"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root" / SWAP.lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text("60\n")
    return tmp_path / "root"


def swap_step(before: str | None = "60") -> Advice:
    return Advice((Step(path=SWAP, before=before, after="1", why="test"),), ())


def test_a_healthy_machine_needs_no_change() -> None:
    assert advise(host_with(TWO, {}), needs_for(TWO)) == Advice((), ())


@pytest.mark.parametrize(
    ("fault", "path"),
    [
        ("swappiness-high", SWAP),
        ("numa-balancing-on", "/proc/sys/kernel/numa_balancing"),
        ("zone-reclaim-on", "/proc/sys/vm/zone_reclaim_mode"),
        ("max-map-count-low", "/proc/sys/vm/max_map_count"),
        ("huge-pages-off", "/sys/kernel/mm/transparent_hugepage/enabled"),
        ("huge-page-defrag-always", "/sys/kernel/mm/transparent_hugepage/defrag"),
    ],
)
def test_each_finding_that_a_file_can_cure_has_its_step(fault: str, path: str) -> None:
    host, needs = host_with(TWO, FAULTS[fault].edits), needs_for(TWO)
    assert [f.check for f in check(host, needs).findings] == [fault]
    assert [step.path for step in advise(host, needs).steps] == [path]


def test_huge_pages_are_reserved_on_each_node_on_top_of_those_in_use() -> None:
    folder = "read /sys/devices/system/node/node1/hugepages/hugepages-2048kB"
    host = host_with(TWO, {f"{folder}/nr_hugepages": "700", f"{folder}/free_hugepages": "200"})
    needs = needs_for(TWO, huge_page_bytes=2 << 20, pinned_bytes_by_node={0: GIB, 1: 2 * GIB})
    steps = advise(host, needs).steps
    assert [(s.path.split("/")[5], s.before, s.after) for s in steps] == [
        ("node0", "0", "512"),
        ("node1", "700", "1524"),
    ]


def test_what_was_applied_can_be_undone(root: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    apply(swap_step(), record, root=root, for_good=True)
    assert (root / SWAP.lstrip("/")).read_text() == "1\n"
    lasting = root / "etc/sysctl.d/90-moe-appliance.conf"
    assert "vm.swappiness = 1" in lasting.read_text()
    undo(record, root=root)
    assert (root / SWAP.lstrip("/")).read_text() == "60\n"
    assert not lasting.exists() and not record.exists()


def test_a_second_apply_waits_until_the_first_is_undone(root: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    apply(swap_step(), record, root=root)
    with pytest.raises(TuneError, match="undo it first"):
        apply(swap_step(), record, root=root)


def test_a_step_that_fails_leaves_a_record_of_what_was_done(root: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    gone = Step(path="/proc/sys/vm/no/such", before="0", after="1", why="test")
    with pytest.raises(TuneError, match="no such file"):
        apply(Advice((*swap_step().steps, gone), ()), record, root=root)
    assert "swappiness" in record.read_text()


def test_a_value_unknown_before_cannot_be_put_back_and_says_so(root: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    apply(swap_step(before=None), record, root=root)
    with pytest.raises(TuneError, match="had an unknown value before"):
        undo(record, root=root)


def test_a_kernel_that_gives_fewer_pages_than_asked_is_an_error(root: Path, tmp_path: Path) -> None:
    """A pool that cannot grow keeps its old number without any error from the write."""
    target = root / SWAP.lstrip("/")
    target.unlink()
    target.symlink_to("/dev/null")
    with pytest.raises(TuneError, match="no more to give"):
        apply(swap_step(), tmp_path / "record.json", root=root)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (SWAP, "vm.swappiness = 1"),
        ("/sys/kernel/mm/transparent_hugepage/enabled",
         "w /sys/kernel/mm/transparent_hugepage/enabled - - - - 1"),
    ],
)  # fmt: skip
def test_a_lasting_change_is_written_where_the_system_reads_it(path: str, line: str) -> None:
    assert Step(path=path, before="0", after="1", why="test").lasting[1] == line


def test_locked_memory_is_a_note_since_no_kernel_file_sets_it() -> None:
    host = host_with(TWO, FAULTS["memlock-low"].edits)
    (note,) = advise(host, needs_for(TWO)).notes
    assert "memlock unlimited" in note
