"""Checkpoints on disk: names, shapes, determinism, and nothing half-made."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from appliance.checkpoint.synth import SynthSpec, synthesize
from appliance.errors import ApplianceError, UsageError


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor's dtype and shape, as the official reader sees them."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a dict
                part = stored.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_an_expert_has_the_tensors_and_shapes_of_exl3(tmp_path: Path) -> None:
    spec = SynthSpec(hidden_size=256, intermediate_size=128, bits=(2, 3, 4), codebook="mcg")
    synthesize(tmp_path / "model", spec)
    found = headers(tmp_path / "model")
    gate, down = (f"model.layers.3.mlp.experts.15.{p}_proj" for p in ("gate", "down"))
    assert found[f"{gate}.trellis"] == ("I16", (16, 8, 32))
    assert found[f"{gate}.suh"] == ("F16", (256,))
    assert found[f"{gate}.svh"] == ("F16", (128,))
    assert found[f"{gate}.mcg"] == ("I32", ())
    assert found[f"{down}.trellis"] == ("I16", (8, 16, 64))
    assert found["lm_head.trellis"] == ("I16", (16, 64, 96))


@pytest.mark.parametrize(("codebook", "markers"), [("3inst", set()), ("mul1", {"mul1"})])
def test_only_the_codebook_in_use_has_a_marker(
    tmp_path: Path, codebook: str, markers: set[str]
) -> None:
    synthesize(tmp_path / "model", SynthSpec(codebook=codebook))
    kinds = {name.rpartition(".")[2] for name in headers(tmp_path / "model")}
    assert kinds & {"mcg", "mul1"} == markers


def test_half_bits_make_trellises_of_half_steps(tmp_path: Path) -> None:
    synthesize(tmp_path / "model", SynthSpec(bits=(1.5, 2.5, 3.5), codebook="mul1"))
    expert = "model.layers.1.mlp.experts.0"
    found = headers(tmp_path / "model")
    widths = [found[f"{expert}.{p}_proj.trellis"][1][2] for p in ("gate", "up", "down")]
    assert widths == [24, 40, 56]


def test_a_linear_that_two_ranks_cannot_split_stays_bf16(tmp_path: Path) -> None:
    synthesize(tmp_path / "model", SynthSpec(kv_heads=1))
    found = headers(tmp_path / "model")
    attention = "model.layers.0.self_attn"
    assert found[f"{attention}.k_proj.weight"] == ("BF16", (128, 256))
    # vLLM merges q, k and v: one of them in bf16 means all of them.
    assert found[f"{attention}.q_proj.weight"] == ("BF16", (512, 256))
    assert f"{attention}.o_proj.trellis" in found


def test_an_unquantised_head_is_a_bf16_matrix(tmp_path: Path) -> None:
    synthesize(tmp_path / "model", SynthSpec(quantise_head=False))
    assert headers(tmp_path / "model")["lm_head.weight"] == ("BF16", (1024, 256))
    assert "head_bits" not in read(tmp_path / "model" / "config.json")["quantization_config"]


@pytest.mark.parametrize("shards", [2, 5])
def test_the_index_lists_every_tensor_and_every_shard(tmp_path: Path, shards: int) -> None:
    synthesize(tmp_path / "model", SynthSpec(shards=shards))
    index = read(tmp_path / "model" / "model.safetensors.index.json")
    files = {file.name for file in (tmp_path / "model").glob("*.safetensors")}
    assert len(files) == shards
    assert set(index["weight_map"].values()) == files
    assert set(index["weight_map"]) == set(headers(tmp_path / "model"))


def test_one_shard_is_one_file_without_an_index(tmp_path: Path) -> None:
    synthesize(tmp_path / "model", SynthSpec(shards=1))
    assert [f.name for f in (tmp_path / "model").glob("model*")] == ["model.safetensors"]


def test_the_same_spec_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        synthesize(tmp_path / name, SynthSpec(seed=seed))
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert a["model-00001-of-00002.safetensors"] != c["model-00001-of-00002.safetensors"]


def test_the_number_of_shards_does_not_change_a_tensor(tmp_path: Path) -> None:
    name, seen = "model.layers.2.mlp.experts.7.up_proj.trellis", []
    for shards in (1, 3):
        synthesize(tmp_path / str(shards), SynthSpec(shards=shards))
        for file in (tmp_path / str(shards)).glob("*.safetensors"):
            with safe_open(file, "pt") as stored:
                if name in stored.keys():  # noqa: SIM118 - not a dict
                    seen.append(stored.get_tensor(name))
    assert len(seen) == 2
    assert seen[0].equal(seen[1])


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious").write_text("x")
    with pytest.raises(UsageError, match="exists and is not empty"):
        synthesize(tmp_path / "model", SynthSpec())
    assert contents(tmp_path / "model") == {"precious": b"x"}


def test_a_run_that_fails_midway_leaves_nothing(tmp_path: Path) -> None:
    def stop_halfway(what: str, done: int, total: int) -> None:
        if what == "weights" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize(tmp_path / "model", SynthSpec(), progress=stop_halfway)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ApplianceError, match=r"cannot write .*model: .*File exists: .*file"):
        synthesize(tmp_path / "file" / "model", SynthSpec())


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    synthesize(tmp_path / "model", SynthSpec(), progress=lambda *call: calls.append(call))
    what, done, total = calls[-1]
    assert (what, done) == ("weights", total)
    on_disk = sum(f.stat().st_size for f in (tmp_path / "model").glob("*.safetensors"))
    assert 0 < on_disk - total < 100_000  # the rest is headers
