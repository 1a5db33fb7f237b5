"""Experts in a file that `weights repack` wrote: the engine reads those bytes where they are."""

import os
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from appliance.checkpoint.exl3 import read_checkpoint  # noqa: E402
from appliance.checkpoint.model import Checkpoint  # noqa: E402
from appliance.checkpoint.safetensors import read_bytes  # noqa: E402
from appliance.checkpoint.synth import SynthSpec, synthesize  # noqa: E402
from appliance.engine.arena import Arena  # noqa: E402
from appliance.engine.hostmem import HostMemoryError, Node  # noqa: E402
from appliance.engine.stored import FileMapping, chunks_of, runs  # noqa: E402
from appliance.errors import WeightsError  # noqa: E402
from appliance.plan.planner import plan  # noqa: E402
from appliance.plan.request import Policy  # noqa: E402
from appliance.weights.arena_file import open_arena  # noqa: E402
from appliance.weights.repack import repack  # noqa: E402
from preflight import inspect  # noqa: E402
from preflight.source import Live  # noqa: E402

PAGE = 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("stored") / "model"
    synthesize(folder, SynthSpec(layers=3, hidden_size=128, intermediate_size=256, experts=8))
    return read_checkpoint(folder)


@pytest.fixture(scope="module")
def packed(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    for parts in (1, 2):
        repack(checkpoint, folder, parts, lambda done, total: None)
    return folder


def arena_of(checkpoint: Checkpoint, packed: Path, rank: int = 0, parts: int = 1) -> Arena:
    policy = Policy(
        device="cpu", host_share=0.6, tensor_parallel=parts, streams=2, context_tokens=128
    )
    made = plan(inspect(Live()), checkpoint, None, policy)
    stored = open_arena(packed, checkpoint, rank, parts)
    return Arena(made, rank, checkpoint, torch.device("cpu"), stored=stored)


def stored_trellis(checkpoint: Checkpoint, arena: Arena, layer: int, expert: int, p: int):
    moe = arena.layer(layer)
    name = f"{moe.prefix}.{expert}.{moe.projection_names[p]}.trellis"
    tensor = checkpoint.tensors[name]
    raw = bytearray(read_bytes(checkpoint.path, tensor))
    return torch.frombuffer(raw, dtype=torch.int16).reshape(tensor.shape)


@pytest.mark.parametrize(("rank", "parts"), [(0, 1), (0, 2), (1, 2)])
def test_host_experts_are_read_from_the_file_without_being_loaded(checkpoint, packed, rank, parts):
    arena = arena_of(checkpoint, packed, rank, parts)
    host = [key for key, block in arena.blocks.items() if block.home == "host"]
    assert 0 < len(host) < len(arena.blocks)
    for layer, expert in host:  # nothing was written: the bytes are the file's
        for p in range(3):
            share = arena.shard.trellis(p, stored_trellis(checkpoint, arena, layer, expert, p))
            assert arena.read(layer, expert, p) == share.contiguous().numpy().tobytes()
    pool = arena.pools["host"]
    assert pool.size_bytes == arena.bytes_in("host") < pool.span_bytes
    assert pool.mapping is not None and pool.mapping.page_kind == "file"
    pool.close()


def test_loading_writes_device_experts_and_leaves_the_file_alone(checkpoint, packed):
    before = (packed / "arena-0-of-1.bin").read_bytes()
    arena = arena_of(checkpoint, packed)
    for layer, expert in arena.blocks:
        for p in range(3):
            tensor = stored_trellis(checkpoint, arena, layer, expert, p)
            arena.write(layer, expert, p, tensor)
            assert arena.read(layer, expert, p) == tensor.numpy().tobytes()
    arena.pools["host"].close()
    assert (packed / "arena-0-of-1.bin").read_bytes() == before


def test_a_file_of_another_checkpoint_or_rank_is_refused(checkpoint, packed, tmp_path):
    synthesize(tmp_path / "other", SynthSpec(layers=3, hidden_size=128, intermediate_size=256))
    with pytest.raises(WeightsError, match="was made of another checkpoint"):
        open_arena(packed, read_checkpoint(tmp_path / "other"), 0, 1)
    (tmp_path / "arena-1-of-2.bin").write_bytes((packed / "arena-0-of-2.bin").read_bytes())
    with pytest.raises(WeightsError, match="or for another rank"):
        open_arena(tmp_path, checkpoint, 1, 2)
    with pytest.raises(WeightsError, match="cannot read"):
        open_arena(tmp_path, checkpoint, 0, 1)


def test_neighbours_are_one_run_and_registrations_end_between_blocks():
    assert runs([(8, 4), (0, 4), (4, 4), (20, 4)]) == [range(12), range(20, 24)]
    starts = [0, PAGE, 2 * PAGE, 9 * PAGE]
    assert chunks_of(range(PAGE, 3 * PAGE), starts) == [range(PAGE, 3 * PAGE)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "blocks"
    path.write_bytes(bytes(range(256)) * (8 * PAGE // 256))
    return path


def test_between_the_pieces_there_is_nothing_to_read_and_nothing_can_be_written(file):
    pieces = [range(PAGE), range(4 * PAGE, 6 * PAGE)]
    with_gap = FileMapping(file, pieces)
    assert bytes(with_gap.view(4 * PAGE, 256)) == bytes(range(256))
    assert with_gap.contains(with_gap.address + 4 * PAGE, 2 * PAGE)
    assert not with_gap.contains(with_gap.address, 2 * PAGE)
    for touch in (
        lambda: with_gap.view(2 * PAGE, 1)[0],
        lambda: with_gap.view(0, 1).__setitem__(0, 1),
    ):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            touch()
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    with_gap.close()


def test_a_file_cut_short_is_a_sentence_not_a_bus_error(file):
    os.truncate(file, 5 * PAGE)
    with pytest.raises(HostMemoryError, match=r"ends at byte 20,480, before 24,576.*repack again"):
        FileMapping(file, [range(4 * PAGE, 6 * PAGE)])


def test_pages_of_a_file_lie_on_the_node_that_was_asked_for(file):
    from appliance.engine.resident import pages_by_node

    mapped = FileMapping(file, [range(8 * PAGE)], Node(0))
    assert pages_by_node(mapped.address, mapped.size_bytes) in ({0: 8}, {})
    mapped.close()


def test_a_node_that_is_not_here_is_refused(file):
    with pytest.raises(HostMemoryError, match="refused to read onto NUMA node 9"):
        FileMapping(file, [range(PAGE)], Node(9))
