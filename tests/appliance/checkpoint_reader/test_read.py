"""A valid checkpoint, in every form it may lie on disk."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_checkpoint as tiny

from appliance.checkpoint.exl3 import checkpoint_digest, read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.checkpoint.synth.make import synthesize
from appliance.checkpoint.synth.spec import SynthSpec

MODELS = (tiny.qwen, tiny.deepseek)


def total_bytes(checkpoint: Checkpoint) -> int:
    return sum(
        part.size_bytes for part in (*checkpoint.layers, *checkpoint.tables, *checkpoint.dense)
    )


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_stored_byte_is_counted_once(
    tmp_path: Path, make: Callable[[], tiny.Model], shards: int
) -> None:
    checkpoint = read_checkpoint(make().write(tmp_path, shards=shards))
    headers = sum(
        8 + int.from_bytes(file.read_bytes()[:8], "little")
        for file in tmp_path.glob("*.safetensors")
    )
    on_disk = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert checkpoint.size_bytes == on_disk - headers
    assert total_bytes(checkpoint) == checkpoint.size_bytes
    assert checkpoint.warnings == ()


def test_sharding_and_index_do_not_change_what_is_read(tmp_path: Path) -> None:
    model = tiny.deepseek()
    one = read_checkpoint(model.write(tmp_path / "one"))
    three = read_checkpoint(model.write(tmp_path / "three", shards=3))
    bare = read_checkpoint(model.write(tmp_path / "bare", shards=3, index=False))
    assert one.layers == three.layers == bare.layers
    assert one.digest == three.digest == bare.digest == checkpoint_digest(one.tensors)


def test_the_digest_changes_with_one_shape(tmp_path: Path) -> None:
    model = tiny.qwen()
    before = read_checkpoint(model.write(tmp_path / "a")).digest
    model.tensors["model.norm.weight"] = ("F32", (256,))
    assert read_checkpoint(model.write(tmp_path / "b")).digest != before


def test_layers_experts_and_top_k_come_out(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.qwen(layers=3, experts=5).write(tmp_path))
    assert (checkpoint.family, checkpoint.quantisation) == ("qwen", "exl3")
    assert [layer.index for layer in checkpoint.layers] == [0, 1, 2]
    assert checkpoint.expert_count == 15
    layer = checkpoint.layers[2]
    assert layer.prefix == "model.layers.2.mlp.experts"
    assert layer.projection_names == ("gate_proj", "up_proj", "down_proj")
    assert layer.top_k == 2
    gate, up, down = layer.experts[4].projections
    assert (gate.k, gate.n, gate.bits, gate.codebook) == (256, 128, 3, "mcg")
    assert (up.k, up.n) == (256, 128)
    assert (down.k, down.n) == (128, 256)
    # FACTS section 1: 3*H*I*K/8 + 3*2*(H+I) + 12.
    assert layer.experts[4].size_bytes == 3 * 256 * 128 * 3 // 8 + 3 * 2 * (256 + 128) + 12


def test_draft_experts_are_apart_from_the_targets(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(
        tiny.deepseek(layers=2, experts=4, draft_experts=2).write(tmp_path)
    )
    assert [(layer.index, layer.draft, layer.top_k) for layer in checkpoint.layers] == [
        (0, False, 2), (1, False, 2), (2, True, 1),
    ]  # fmt: skip
    assert checkpoint.expert_count == 8
    assert len(checkpoint.target_layers) == 2


def test_equal_experts_share_one_object(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(tiny.qwen().write(tmp_path))
    assert len({id(e) for layer in checkpoint.layers for e in layer.experts}) == 1


def test_the_engram_table_has_264_byte_rows(tmp_path: Path) -> None:
    (table,) = read_checkpoint(tiny.deepseek().write(tmp_path)).tables
    assert (table.layer, table.rows, table.row_bytes) == (1, 1000, 264)
    assert (table.size_bytes, table.format) == (264_000, "fp8")


@pytest.mark.parametrize("collecting", [True, False])
def test_the_garbage_collector_is_left_as_it_was(tmp_path: Path, collecting: bool) -> None:
    folder = tiny.qwen().write(tmp_path)
    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        read_checkpoint(folder)
        assert gc.isenabled() == collecting
    finally:
        (gc.enable if before else gc.disable)()


def test_an_index_in_another_order_changes_nothing(tmp_path: Path) -> None:
    model = tiny.qwen()
    model.write(tmp_path, shards=2)
    index = json.loads((tmp_path / tiny.INDEX).read_text())
    index["weight_map"] = dict(reversed(index["weight_map"].items()))
    (tmp_path / tiny.INDEX).write_text(json.dumps(index))
    assert read_checkpoint(tmp_path).layers == read_checkpoint(tmp_path).layers


@pytest.mark.parametrize(
    ("family", "bits", "codebook"),
    [("qwen3_moe", (2, 3, 4), "mcg"), ("deepseek_v3", (2.5, 2.5, 3.5), "mul1")],
)
def test_a_synthetic_checkpoint_reads_back_as_it_was_ordered(
    tmp_path: Path, family: str, bits: tuple[float, float, float], codebook: str
) -> None:
    spec = SynthSpec(family=family, layers=3, experts=4, top_k=2, bits=bits, codebook=codebook)
    synthesize(tmp_path / "model", spec)
    checkpoint = read_checkpoint(tmp_path / "model")
    assert checkpoint.warnings == ()
    assert [layer.index for layer in checkpoint.layers] == [1, 2]
    shapes = {e.projections for layer in checkpoint.layers for e in layer.experts}
    (projections,) = shapes
    assert tuple(p.bits for p in projections) == bits
    assert {p.codebook for p in projections} == {codebook}
    assert total_bytes(checkpoint) == checkpoint.size_bytes
