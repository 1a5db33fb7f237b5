"""Whatever a file holds, the reader gives a checkpoint or a CheckpointError, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint as tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.safetensors import read_headers
from appliance.errors import CheckpointError

QUICK = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def survives(folder: Path) -> bool:
    try:
        checkpoint = read_checkpoint(folder)
    except CheckpointError as error:
        assert error.message.isprintable()
        return False
    parts = (*checkpoint.layers, *checkpoint.tables, *checkpoint.dense)
    assert sum(part.size_bytes for part in parts) == checkpoint.size_bytes
    return True


@QUICK
@given(content=st.binary(max_size=200))
def test_random_bytes(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_headers(file)


@QUICK
@given(header=JSON, data=st.integers(0, 50))
def test_random_json_as_a_header(tmp_path: Path, header: Any, data: int) -> None:
    file = tiny.write_raw(tmp_path / "m.safetensors", header, data)
    try:
        tensors = read_headers(file)
    except CheckpointError:
        return
    assert sum(tensor.size_bytes for tensor in tensors.values()) == data


@QUICK
@given(data=st.data())
def test_a_shard_with_one_byte_changed_or_cut_short(tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "m").mkdir(exist_ok=True)
    folder = tiny.deepseek(layers=2, experts=2).write(tmp_path / "m")
    file = next(folder.glob("*.safetensors"))
    header_bytes = int.from_bytes(file.read_bytes()[:8], "little")
    at = data.draw(st.integers(0, 8 + header_bytes - 1))
    with file.open("r+b") as stream:
        if data.draw(st.booleans()):
            stream.truncate(at)
        else:
            stream.seek(at)
            stream.write(bytes([data.draw(st.integers(0, 255))]))
    survives(folder)


@QUICK
@given(data=st.data())
def test_a_model_with_one_tensor_changed(tmp_path: Path, data: st.DataObject) -> None:
    model = tiny.deepseek(layers=2, experts=2)
    name = data.draw(st.sampled_from(sorted(model.tensors)))
    dtype, shape = model.tensors.pop(name)
    change = data.draw(st.sampled_from(["drop", "rename", "dtype", "shape"]))
    if change == "rename":
        cut = data.draw(st.integers(0, len(name)))
        insert = data.draw(st.sampled_from(["", ".", "0", ".rank0", "x.", ".experts.0", "\n", "é"]))
        model.tensors[name[:cut] + insert + name[cut + 1 :]] = (dtype, shape)
    elif change == "dtype":
        model.tensors[name] = (data.draw(st.sampled_from(sorted(tiny.BITS))), shape)
    elif change == "shape":
        dims = data.draw(st.lists(st.integers(0, 64).map(lambda i: 16 * i), max_size=4))
        model.tensors[name] = (dtype, tuple(dims))
    survives(model.write(tmp_path))


@QUICK
@given(data=st.data())
def test_a_config_with_one_value_changed(tmp_path: Path, data: st.DataObject) -> None:
    model = tiny.deepseek(layers=2, experts=2)
    text = model.config["text_config"]
    target = data.draw(st.sampled_from([model.config, text, model.config["quantization_config"]]))
    extra = [
        "moe_layer_freq",
        "first_k_dense_replace",
        "mlp_layer_types",
        "layer_bits",
        "head_bits",
    ]
    target[data.draw(st.sampled_from([*target, *extra]))] = data.draw(JSON)
    survives(model.write(tmp_path))


@QUICK
@given(index=JSON, in_map=st.booleans())
def test_any_json_as_an_index(tmp_path: Path, index: Any, in_map: bool) -> None:
    folder = tiny.qwen(layers=1, experts=2).write(tmp_path, shards=2)
    (folder / tiny.INDEX).write_text(json.dumps({"weight_map": index} if in_map else index))
    assert not survives(folder)


@pytest.mark.parametrize("make", [tiny.qwen, tiny.deepseek])
def test_the_unchanged_models_do_survive(tmp_path: Path, make: Any) -> None:
    assert survives(make().write(tmp_path))
