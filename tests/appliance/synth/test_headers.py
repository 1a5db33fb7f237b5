"""Large models as headers: exact where FACTS are, true sizes, no disk."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.model import Checkpoint
from appliance.checkpoint.synth import MODELS, headers_only
from appliance.errors import UsageError

GIB = 1 << 30
EXPERT_K3 = 13_315_596  # FACTS section 1
Read = Callable[[str], Checkpoint]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Makes a model and reads it; each model once."""

    @cache
    def make(model: str) -> Checkpoint:
        folder = tmp_path_factory.mktemp("headers") / model
        headers_only(folder, model)
        return read_checkpoint(folder)

    return make


def role_bytes(checkpoint: Checkpoint, *roles: str) -> int:
    return sum(part.size_bytes for part in checkpoint.dense if part.role in roles)


def named_bytes(checkpoint: Checkpoint, *words: str) -> int:
    return sum(t.size_bytes for t in checkpoint.tensors.values() if any(w in t.name for w in words))


def ledger(checkpoint: Checkpoint) -> dict[str, float]:
    """FACTS' parts in GiB; indexers and compressors are no "attention" there but "other"."""
    inside = named_bytes(checkpoint, ".indexer.", ".compressor.")
    drafts = sum(layer.size_bytes for layer in checkpoint.layers if layer.draft)
    routed = sum(layer.size_bytes for layer in checkpoint.target_layers)
    tables = sum(table.size_bytes for table in checkpoint.tables)
    found = {
        "routed": routed + role_bytes(checkpoint, "routed_experts"),
        "engram": tables + role_bytes(checkpoint, "lookup"),
        "draft": drafts + role_bytes(checkpoint, "draft"),
        "attention": role_bytes(checkpoint, "attention") - inside,
        "shared": role_bytes(checkpoint, "shared_experts"),
        "embedding": role_bytes(checkpoint, "embedding"),
        "head": role_bytes(checkpoint, "head"),
        "vision": role_bytes(checkpoint, "vision"),
        "other": role_bytes(checkpoint, "other", "router", "norm") + inside,
    }
    assert sum(found.values()) == checkpoint.size_bytes
    return {part: round(size / GIB, 2) for part, size in found.items()}


def test_the_official_release_closes_the_public_ledger(read: Read) -> None:
    checkpoint = read("deepseek-v4.1-flash-official")
    assert ledger(checkpoint) == {
        "routed": 268.95,
        "engram": 189.13,
        "draft": 7.39,
        "attention": 4.72,
        "shared": 1.32,
        "embedding": 1.23,
        "head": 1.23,
        "vision": 0.9,
        "other": 0.37,
    }
    assert round(checkpoint.size_bytes / GIB, 1) == 475.2
    assert checkpoint.quantisation == "fp4"


def test_the_package_has_the_public_total_and_exact_experts_and_tables(read: Read) -> None:
    checkpoint = read("deepseek-v4.1-flash")
    assert round(checkpoint.size_bytes / GIB, 1) == 309.3
    assert checkpoint.expert_count == 15_360
    assert {e.size_bytes for layer in checkpoint.layers for e in layer.experts} == {EXPERT_K3}
    assert [(layer.index, len(layer.experts), layer.top_k) for layer in checkpoint.layers] == [
        *((index, 384, 6) for index in range(40)),
        *((index, 128, 3) for index in (40, 41, 42)),
    ]
    assert [(table.layer, table.row_bytes, table.format) for table in checkpoint.tables] == [
        (1, 144, "int4"),
        (14, 144, "int4"),
    ]
    assert round(sum(table.size_bytes for table in checkpoint.tables) / GIB, 1) == 103.0
    assert checkpoint.warnings == ()


def test_the_package_and_the_release_differ_only_where_it_was_quantised(read: Read) -> None:
    package, release = (ledger(read(f"deepseek-v4.1-flash{which}")) for which in ("", "-official"))
    same = ("attention", "shared", "embedding", "head", "vision", "other")
    assert [package[part] for part in same] == [release[part] for part in same]
    assert (package["routed"], package["draft"]) == (190.48, 5.43)


@pytest.mark.parametrize(
    ("model", "layers", "experts", "top_k", "hidden", "inner"),
    [
        ("glm-5.3-flash", range(3, 45), 288, 8, 4096, 2048),
        ("deepseek-v4-flash", range(43), 256, 6, 4096, 2048),
        ("qwen3.8-flash-next", range(48), 512, 10, 2560, 640),
    ],
)
def test_other_models_have_the_public_shapes(
    tmp_path: Path, model: str, layers: range, experts: int, top_k: int, hidden: int, inner: int
) -> None:
    headers_only(tmp_path / "model", model)
    checkpoint = read_checkpoint(tmp_path / "model")
    assert [layer.index for layer in checkpoint.layers] == list(layers)
    assert {(len(layer.experts), layer.top_k) for layer in checkpoint.layers} == {(experts, top_k)}
    one = checkpoint.layers[0].experts[0]
    assert [(p.k, p.n, p.bits) for p in one.projections] == [
        (hidden, inner, 3),
        (hidden, inner, 3),
        (inner, hidden, 3),
    ]
    assert one.size_bytes == 3 * hidden * inner * 3 // 8 + 6 * (hidden + inner) + 12
    assert checkpoint.warnings == ()


def test_files_have_their_true_size_and_take_next_to_no_disk(read: Read) -> None:
    files = list(read("deepseek-v4.1-flash").path.iterdir())
    assert len(files) > 36
    assert sum(file.stat().st_size for file in files) > 309 * GIB
    assert sum(file.stat().st_blocks * 512 for file in files) < GIB // 8


def test_a_header_says_that_it_is_one_alone(read: Read) -> None:
    file = min(read("deepseek-v4.1-flash").path.glob("*.safetensors"))
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    assert header["__metadata__"]["content"] == "headers only"


def test_an_unknown_model_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        headers_only(tmp_path / "model", "gpt-9")
    assert caught.value.fix == f"one of {', '.join(MODELS)}"
    assert list(tmp_path.iterdir()) == []
