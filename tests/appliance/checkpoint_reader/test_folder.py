"""The folder: shards, index, config.json, and what each can do to the others."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint as tiny

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.errors import CheckpointError

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 4978265800\n"
)
SECOND = "model-00002-of-00003.safetensors"


def refused(folder: Path, words: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=words) as caught:
        read_checkpoint(folder)
    return caught.value


def edit_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / tiny.INDEX).read_text())
    change(index["weight_map"])
    (folder / tiny.INDEX).write_text(json.dumps(index))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.qwen().write(tmp_path, shards=3)


@pytest.mark.parametrize("name", [SECOND, "config.json", tiny.INDEX])
def test_a_git_lfs_pointer_is_named_for_what_it_is(folder: Path, name: str) -> None:
    """B032: the reference reader says "HeaderTooLarge"."""
    (folder / name).write_text(POINTER)
    error = refused(folder, f"{name} is a Git LFS pointer")
    assert "git lfs pull" in str(error)


def test_an_index_that_lists_a_missing_shard(folder: Path) -> None:
    (folder / SECOND).unlink()
    refused(folder, f"lists {SECOND}, which is not in the folder")


def test_missing_shards_show_by_their_numbers_without_an_index(tmp_path: Path) -> None:
    folder = tiny.qwen().write(tmp_path, shards=3, index=False)
    (folder / SECOND).unlink()
    refused(folder, "has 2 of 3 shards and no model.safetensors.index.json")


def test_a_tensor_the_index_forgot_is_a_warning(folder: Path) -> None:
    """B035: the tensor is in the shard but not in the index."""
    edit_index(folder, lambda weight_map: weight_map.pop("model.norm.weight"))
    (warning,) = read_checkpoint(folder).warnings
    assert "does not list model.norm.weight of model-0000" in warning


def test_a_tensor_the_index_promises_and_no_shard_has(folder: Path) -> None:
    edit_index(folder, lambda weight_map: weight_map.update({"model.extra": SECOND}))
    refused(folder, f"lists 'model.extra' in {SECOND}, whose header does not have it")


def test_an_index_that_points_to_the_wrong_shard_is_a_warning(folder: Path) -> None:
    def move(weight_map: dict[str, str]) -> None:
        name = next(name for name, shard in weight_map.items() if shard != SECOND)
        weight_map[name] = SECOND

    edit_index(folder, move)
    (warning,) = read_checkpoint(folder).warnings
    assert "is stale: it puts model." in warning


def test_an_unlisted_shard_with_needed_tensors_is_an_error(folder: Path) -> None:
    def forget(weight_map: dict[str, str]) -> None:
        for name in [name for name, shard in weight_map.items() if shard == SECOND]:
            del weight_map[name]

    edit_index(folder, forget)
    refused(folder, f"does not list {SECOND}, so vLLM would silently skip")


@pytest.mark.parametrize(
    "tensors",
    [
        {"model.norm.weight": ("BF16", (256,))},
        {"mtp.0.fc.weight": ("BF16", (256, 256))},
        {"training_state.step": ("I32", ())},
    ],
    ids=["a copy", "a draft layer", "no part of the model"],
)
def test_an_unlisted_shard_that_nothing_needs_is_a_warning(folder: Path, tensors: Any) -> None:
    tiny.write_shard(folder / "extra.safetensors", tensors)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.warnings == (
        f"extra.safetensors is not in {tiny.INDEX} and will not load; nothing of the model is only "
        "there",
    )
    assert all(tensor.file != "extra.safetensors" for tensor in checkpoint.tensors.values())


def test_an_unlisted_broken_shard_is_a_warning(folder: Path) -> None:
    (folder / "old.safetensors").write_text(POINTER)
    (warning,) = read_checkpoint(folder).warnings
    assert "old.safetensors is not in" in warning
    assert "Git LFS pointer" in warning


@pytest.mark.parametrize("indexed", [True, False])
def test_the_same_tensor_in_two_shards(folder: Path, indexed: bool) -> None:
    tiny.write_shard(folder / "more.safetensors", {"model.norm.weight": ("BF16", (256,))})
    if indexed:
        tiny.write_shard(
            folder / "more.safetensors",
            {"model.norm.weight": ("BF16", (256,)), "model.new": ("BF16", (2,))},
        )
        edit_index(folder, lambda weight_map: weight_map.update({"model.new": "more.safetensors"}))
    else:
        (folder / tiny.INDEX).unlink()
    refused(folder, "model.norm.weight is in model-.* and in more.safetensors")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "not a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 1}}', "no shard's name"),
        ('{"weight_map": {"a": "../m.safetensors"}}', "no shard's name"),
        ('{"weight_map": {"a": "m.bin"}}', "no shard's name"),
        ('{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}', "key 'a' twice"),
        ('{"weight_map": ', "not JSON"),
    ],
)
def test_an_index_that_is_no_index(folder: Path, text: str, words: str) -> None:
    (folder / tiny.INDEX).write_text(text)
    refused(folder, words)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "is not there; a model is a folder")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is a file; a model is a folder")
    refused(tmp_path, "has no config.json")
    (tmp_path / "config.json").write_text(json.dumps(tiny.qwen().config))
    refused(tmp_path, "has no .*safetensors file")


def test_a_dangling_link_to_a_shard_is_named(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to("../blobs/gone")
    refused(folder, f"cannot read .*{SECOND}: No such file")


def test_mistrals_own_format_would_hide_the_rest(folder: Path) -> None:
    tiny.write_shard(folder / "consolidated.safetensors", {"norm.weight": ("BF16", (256,))})
    refused(folder, "consolidated.safetensors: vLLM takes that for Mistral's own format")
