"""Memory that is refused half-way: one sentence with the numbers, and nothing is kept."""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu.made import make_model

torch = pytest.importorskip("torch")

from appliance.checkpoint.exl3 import read_checkpoint  # noqa: E402
from appliance.checkpoint.model import Checkpoint  # noqa: E402
from appliance.checkpoint.synth import SynthSpec  # noqa: E402
from appliance.engine import hostmem  # noqa: E402
from appliance.engine.arena import Arena  # noqa: E402
from appliance.engine.hostmem import HostMapping, HostMemoryError  # noqa: E402
from appliance.engine.pools import shortage  # noqa: E402
from appliance.plan.planner import plan  # noqa: E402
from appliance.plan.request import Policy  # noqa: E402
from preflight import inspect  # noqa: E402
from preflight.source import Live  # noqa: E402

MIB = 1 << 20
MAP_NORESERVE = 0x4000  # mman.h: nothing is set aside, so a page may be missing when it is touched


def bytes_now(resident: bool) -> int:
    """Of this process: resident, or all of its address space."""
    pages = Path("/proc/self/statm").read_text().split()[int(resident)]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """1.7 GB of experts, most of them holes."""
    folder = tmp_path_factory.mktemp("refused") / "model"
    spec = SynthSpec(
        layers=1, dense_layers=0, hidden_size=5120, intermediate_size=2304, experts=128
    )
    make_model(folder, spec)
    return read_checkpoint(folder)


@pytest.fixture
def little_address_space() -> Iterator[None]:
    """Room for the device's home and not for the host's: the kernel itself refuses that."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (bytes_now(resident=False) + 700 * MIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def arena(checkpoint: Checkpoint) -> Arena:
    policy = Policy(device="cpu", host_share=0.9, cache_slots=2, streams=2, context_tokens=128)
    made = plan(inspect(Live()), checkpoint, None, policy)
    return Arena(made, 0, checkpoint, torch.device("cpu"))


@pytest.mark.usefixtures("little_address_space")
def test_a_home_that_does_not_fit_is_a_sentence_and_the_other_home_is_given_back(
    checkpoint: Checkpoint,
) -> None:
    before = bytes_now(resident=True)  # of a home of 200 MB every byte is written
    with pytest.raises(HostMemoryError, match=r"refused to map [\d,]+ bytes.*Try: free memory"):
        arena(checkpoint)
    assert bytes_now(resident=True) - before < 64 * MIB, "the other home is kept"


def test_where_the_device_ends_is_said_to_the_slot() -> None:
    slots = [1000, 1100, 1200]  # after 1,000 bytes of residents
    assert "1,300 bytes of device memory and 999 are free: the residents alone" in shortage(
        1300, 999, slots
    )
    said = [
        re.search(r"slot \d of 3", shortage(1300, free, slots)) for free in (1000, 1099, 1100, 1299)
    ]
    assert [found and found[0] for found in said] == [f"slot {m} of 3" for m in (1, 1, 2, 3)]
    assert "the residents alone would not fit" in shortage(1300, 1200, [])


def test_a_huge_page_that_is_gone_when_it_is_touched_is_a_sentence_and_no_bus_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The counter said yes a moment ago, and somebody else took the pages: nothing is reserved."""
    monkeypatch.setattr(hostmem, "_page_kind", lambda size, node: "hugetlb")
    flags = hostmem._MAP_HUGETLB_2MB | MAP_NORESERVE
    monkeypatch.setattr(hostmem, "_MAP_HUGETLB_2MB", flags)
    with pytest.raises(HostMemoryError, match="Try: reserve more huge pages on that node, or none"):
        HostMapping(64 << 30)  # more than anybody has reserved
    assert "hugepage" not in Path("/proc/self/maps").read_text()
