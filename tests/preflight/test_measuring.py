"""The parts of measured mode that need no GPU: memory, pins' watchdog, disk, time limits."""

import ctypes
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflight.answers import Unreadable
from preflight.host import Host, Limits, NumaNode
from preflight.measure import Wish, measure, measure_here
from preflight.measuring.disk import largest_file, read_rate
from preflight.measuring.hostmem import HUGE, SMALL, Area, bind
from preflight.measuring.pins import RESERVE_BYTES, left_now, trial
from preflight.measuring.read_kernel import BLOCKS, LOADS, THREADS, whole_reads
from preflight.placement import Home, prove
from preflight.source import Live, run_for

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize("page_bytes", [SMALL, HUGE])
def test_an_area_is_touched_where_it_says(page_bytes: int) -> None:
    with Area(8 * MIB, page_bytes=page_bytes) as area:
        assert area.address % HUGE == 0
        assert area.touch() > 0
        assert ctypes.string_at(area.address, 8) == bytes(8)


def test_a_bound_area_is_proved_to_lie_on_its_node() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.fail("this kernel has no numa_maps: the proof cannot be tested")
    try:
        with Area(8 * MIB, node=0) as area:
            area.touch()
            home = Home("area", area.address, 8 * MIB, 0)
            (placed,) = prove(Path("/proc/self/numa_maps").read_text(), [home])
            assert placed.proved, placed.sentence
    except PermissionError:
        # Docker's default profile: the refusal itself is what preflight reports.
        assert Live().trial("memory-policy") != "allowed"


def test_binding_to_a_node_that_is_not_there_is_refused_with_its_number() -> None:
    with Area(HUGE) as area, pytest.raises(OSError, match="mbind to node 1000"):
        bind(area.address, HUGE, 1000)


def test_the_trial_takes_all_where_all_can_be_had() -> None:
    taken: list[int] = []
    done = trial(10 * GIB, 4 * GIB, taken.append, lambda: 100 * GIB, 5)
    assert (done.registered_bytes, done.stopped) == (10 * GIB, None)
    assert taken == [4 * GIB, 4 * GIB, 2 * GIB]


def test_the_watchdog_stops_before_the_host_is_starved() -> None:
    taken: list[int] = []
    done = trial(64 * GIB, GIB, taken.append, lambda: 10 * GIB - sum(taken), 5)
    assert done.registered_bytes == 10 * GIB - RESERVE_BYTES
    assert "stay free" in (done.stopped or "")


def test_a_refused_pin_is_told_in_the_drivers_words() -> None:
    def refuse(size: int) -> None:
        raise Unreadable("cuMemHostRegister: out of memory")

    done = trial(GIB, GIB, refuse, lambda: 100 * GIB, 5)
    assert (done.registered_bytes, done.stopped) == (0, "cuMemHostRegister: out of memory")


def test_memory_that_cannot_be_read_stops_the_trial() -> None:
    assert trial(GIB, GIB, lambda size: None, lambda: None, 5).registered_bytes == 0


def test_the_trial_ends_at_its_deadline() -> None:
    clock = iter(range(0, 1000, 10))
    done = trial(64 * GIB, GIB, lambda s: None, lambda: 900 * GIB, 25, lambda: next(clock))
    assert done.registered_bytes == 2 * GIB and done.stopped == "25 s were over"


@given(
    st.integers(1, 1 << 40), st.integers(1 << 20, 1 << 33), st.integers(0, 1 << 40)
)  # fmt: skip
def test_no_trial_ever_touches_the_reserve(asked: int, chunk: int, have: int) -> None:
    taken = [0]

    def take(size: int) -> None:
        taken[0] += size
        assert have - taken[0] >= RESERVE_BYTES

    # Chunks of a real trial are large; keep the number of steps down here.
    done = trial(min(asked, chunk * 50), chunk, take, lambda: have - taken[0], 5)
    assert done.registered_bytes == taken[0] <= asked


def test_a_control_group_bounds_what_is_left() -> None:
    limits = Limits(cgroup_memory_max_bytes=3 * MIB, cgroup_memory_used_bytes=MIB)
    assert left_now(Live(), Host(limits=limits)) == 2 * MIB


def test_the_largest_file_is_read_past_the_page_cache(tmp_path: Path) -> None:
    if Live().trial("direct-io", str(tmp_path)) != "yes":
        pytest.skip(f"{tmp_path} refuses O_DIRECT")
    (tmp_path / "small").write_bytes(b"x")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(os.urandom(MIB) * 80)
        os.fsync(file.fileno())
    path = largest_file(tmp_path)
    assert path and path.name == "model.safetensors"
    assert read_rate(path, seconds=1) > 1e6
    with pytest.raises(ValueError, match="too small to measure"):
        read_rate(tmp_path / "small")


def test_the_reads_of_a_launch_fill_its_stride() -> None:
    stride = BLOCKS * THREADS * LOADS
    assert whole_reads(256 * MIB) * 16 == 256 * MIB
    assert whole_reads(256 * MIB + 999) % stride == 0
    assert whole_reads(15) == 0


def test_a_command_that_hangs_is_ended_with_its_children() -> None:
    start = time.monotonic()
    program = "import subprocess,sys,time; subprocess.Popen(['sleep','60']); time.sleep(60)"
    with pytest.raises(TimeoutError, match="took more than 1 s"):
        run_for([sys.executable, "-c", program], 1)
    assert time.monotonic() - start < 30


def test_a_measurement_that_hangs_is_a_reason_and_not_a_hang() -> None:
    found = measure(Wish(), seconds=0.05)
    assert "hangs" in found.unmeasured[0].reason


def test_without_a_gpu_the_reason_is_told_and_the_rest_is_measured(tmp_path: Path) -> None:
    found = measure_here(Wish(model=tmp_path))
    told = {unread.what: unread.reason for unread in found.unmeasured}
    if "links and pins" not in told:
        pytest.skip("this machine has a GPU")
    assert told["links and pins"] == "there is no GPU to measure"
    assert "holds no file" in told["disk"]


def test_a_step_that_no_time_is_left_for_says_so(tmp_path: Path) -> None:
    found = measure_here(Wish(model=tmp_path), seconds=0)
    assert "no time left of 0 s" in {unread.reason for unread in found.unmeasured}


def test_nodes_without_memory_are_not_measured_against() -> None:
    from preflight.nearest import host_memory_nodes

    nodes = (NumaNode(index=0, cpus="0", memory_total_bytes=0),
             NumaNode(index=1, cpus="1", memory_total_bytes=GIB))  # fmt: skip
    assert [n.index for n in host_memory_nodes(Host(numa_nodes=nodes))] == [1]
