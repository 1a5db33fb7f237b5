"""Arena files: every block holds exactly the bytes of its expert, aligned, for one rank or two."""

from pathlib import Path

import numpy as np
import pytest
from weights_models import write_model

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.safetensors import read_headers
from appliance.errors import UnsupportedError, WeightsError
from appliance.plan.model import BLOCK_ALIGNMENT_BYTES
from appliance.weights.arena_file import ArenaFile
from appliance.weights.repack import repack


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("repack") / "small", seed=1, rows=8)


def stored(model: Path, name: str) -> np.ndarray:
    """A tensor [k/16, n/16, 16K], read by another way than the code under test."""
    for shard in model.glob("*.safetensors"):
        tensor = read_headers(shard).get(name)
        if tensor is not None:
            data = np.fromfile(shard, np.uint8)[tensor.start : tensor.stop]
            return data.view(np.int16).reshape(tensor.shape)
    raise KeyError(name)


def quiet(done: int, total: int) -> None:
    assert 0 < done <= total


def test_every_block_is_its_experts_gate_up_and_down(small, tmp_path):
    checkpoint = read_checkpoint(small)
    (arena,) = repack(checkpoint, tmp_path, 1, quiet)
    mapped = arena.map()
    for layer in checkpoint.target_layers:
        for expert in range(len(layer.experts)):
            offset, size = arena.block(layer.index, expert)
            assert offset % BLOCK_ALIGNMENT_BYTES == size % BLOCK_ALIGNMENT_BYTES == 0
            wanted = b"".join(
                stored(small, f"{layer.prefix}.{expert}.{word}.trellis").tobytes()
                for word in layer.projection_names
            )
            assert mapped[offset : offset + len(wanted)] == wanted
            assert not any(mapped[offset + len(wanted) : offset + size])
    mapped.close()


def test_two_ranks_hold_the_halves_that_tensor_parallelism_reads(tmp_path):
    from tiny_checkpoint import expert, qwen

    model = qwen(layers=1, experts=2)
    model.config |= {"moe_intermediate_size": 256}
    for e in range(2):
        words = ("gate_proj", "up_proj", "down_proj")
        model.tensors |= expert(f"model.layers.0.mlp.experts.{e}", 256, 256, words)
    folder = model.write(tmp_path / "m")
    (shard,) = folder.glob("*.safetensors")
    header = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    body = np.random.default_rng(1).integers(0, 256, shard.stat().st_size - header, np.uint8)
    shard.write_bytes(shard.read_bytes()[:header] + body.tobytes())
    arenas = repack(read_checkpoint(folder), tmp_path / "out", 2, quiet)
    for rank, arena in enumerate(arenas):
        mapped = arena.map()
        for e in range(2):
            key = f"model.layers.0.mlp.experts.{e}"
            halves = [
                np.split(stored(folder, f"{key}.gate_proj.trellis"), 2, axis=1)[rank],
                np.split(stored(folder, f"{key}.up_proj.trellis"), 2, axis=1)[rank],
                np.split(stored(folder, f"{key}.down_proj.trellis"), 2, axis=0)[rank],
            ]
            wanted = b"".join(np.ascontiguousarray(half).tobytes() for half in halves)
            offset, _ = arena.block(0, e)
            assert mapped[offset : offset + len(wanted)] == wanted
        mapped.close()


def test_a_cut_that_corrupts_is_refused(small, tmp_path):
    with pytest.raises(UnsupportedError, match="128 does not cut into 2 multiples of 128"):
        repack(read_checkpoint(small), tmp_path, 2, quiet)


def test_a_file_cut_short_or_foreign_is_refused(small, tmp_path):
    (arena,) = repack(read_checkpoint(small), tmp_path, 1, quiet)
    data = arena.path.read_bytes()
    arena.path.write_bytes(data[:-1])
    with pytest.raises(WeightsError, match=r"bytes, .* are needed"):
        ArenaFile.open(arena.path)
    arena.path.write_bytes(b"x" + data[1:])
    with pytest.raises(WeightsError, match="no arena file"):
        ArenaFile.open(arena.path)
