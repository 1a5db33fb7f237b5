"""Int4 lookup tables in the place of vLLM's, and what DeepSeek-V4.1's class is given."""

import sys
import types
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from appliance.checkpoint.exl3 import read_checkpoint
from appliance.checkpoint.synth import SynthSpec, synthesize
from appliance.engine import compat
from appliance.engine.deepseek_v41 import dense_head
from appliance.engine.tables import Int4Table
from expert_kernels import lookup, reference

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")
NAME = "layers.1.engram.embed.weight"
HEADS = (7, 5, 11, 3, 2)
ROWS = sum(HEADS)


def stored(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A table as a checkpoint has it, values and scales, and what it means, dense."""
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(-8, 8, (rows, 256), dtype=torch.int8, generator=generator)
    scales = torch.rand(rows, 8, generator=generator).half()
    packed = lookup.pack_int4(values, scales)
    dense = values.float() * scales.float().repeat_interleave(32, 1)
    return packed[:, :128].contiguous(), scales, dense


def fill(table: Int4Table, weight: torch.Tensor, scale: torch.Tensor) -> Int4Table:
    """By the loaders that vLLM calls, under the names that its mapper makes."""
    parameters: dict[str, Any] = dict(table.named_parameters())
    parameters["weight"].weight_loader(parameters["weight"], weight)
    parameters["weight_scale_inv"].weight_loader(parameters["weight_scale_inv"], scale)
    return table


def asked(tokens: int) -> torch.Tensor:
    """Row numbers of the whole table, one of each head's range a token; -1 for a dead token."""
    starts = torch.tensor([0, *accumulate(HEADS)][:-1])
    ids = torch.randint(0, 1000, (tokens, len(HEADS))) % torch.tensor(HEADS) + starts
    ids[tokens // 2] = -1
    return ids.int()


def test_rows_are_those_of_the_dense_table_and_dead_tokens_get_zeros() -> None:
    weight, scale, dense = stored()
    table = fill(Int4Table(HEADS, 256, NAME, CPU), weight, scale)
    ids, out = asked(9), torch.full((9, 5, 256), 7.0, dtype=torch.bfloat16)
    table.lookup(ids, out)
    expected = torch.where(ids[..., None] >= 0, dense[ids.clamp(min=0).long()], 0.0)
    assert torch.equal(out, expected.bfloat16())
    assert out[4].count_nonzero() == 0 < out[3].count_nonzero()
    table.close()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_hold_their_heads_and_together_give_all_of_them(ranks: int) -> None:
    weight, scale, dense = stored()
    tables = [
        fill(Int4Table(HEADS, 256, NAME, CPU, rank=r, ranks=ranks), weight, scale)
        for r in range(ranks)
    ]
    assert sum(table.count for table in tables) == ROWS
    ids, shares = asked(6), []
    for table in tables:
        out = torch.empty(6, table.part_n_hash_cols, 256, dtype=torch.bfloat16)
        table.lookup(ids, out)
        shares.append(out)
    found = torch.cat(shares, 1)
    assert found[:, len(HEADS) :].count_nonzero() == 0  # what fills up the last rank's share
    expected = torch.where(ids[..., None] >= 0, dense[ids.clamp(min=0).long()], 0.0)
    assert torch.equal(found[:, : len(HEADS)], expected.bfloat16())


def test_a_table_of_another_kind_is_refused_with_its_shape() -> None:
    weight, scale, _ = stored()
    table = Int4Table(HEADS, 256, NAME, CPU)
    with pytest.raises(ValueError, match=r"embed.weight: its weight is torch.int8 \[28, 128\]"):
        fill(table, weight.view(torch.int8), scale)
    with pytest.raises(ValueError, match="28 rows at least"):
        fill(table, weight[:-1], scale)
    with pytest.raises(ValueError, match="rows of 128 values"):
        Int4Table(HEADS, 128, NAME, CPU)
    with pytest.raises(ValueError, match="each rank needs a head"):
        Int4Table(HEADS, 256, NAME, CPU, rank=3, ranks=4)


def test_a_table_that_did_not_come_whole_is_not_read() -> None:
    weight, _, _ = stored()
    table = Int4Table(HEADS, 256, NAME, CPU)
    parameter: Any = dict(table.named_parameters())["weight"]
    parameter.weight_loader(parameter, weight)
    with pytest.raises(ValueError, match="came without scale"):
        table.lookup(asked(1), torch.empty(1, 5, 256, dtype=torch.bfloat16))


@pytest.fixture
def thin(tmp_path: Path) -> Path:
    spec = SynthSpec(family="deepseek_v41", layers=3, dense_layers=0, experts=4, top_k=2)
    synthesize(tmp_path / "model", spec)
    return tmp_path / "model"


def test_the_proof_finds_a_row_that_is_not_the_shards(thin: Path) -> None:
    checkpoint = read_checkpoint(thin)
    (found,) = checkpoint.tables
    tensors = {k: v for f in thin.glob("*.safetensors") for k, v in load_file(f).items()}
    table = Int4Table((found.rows,), 256, found.name, CPU)
    fill(table, tensors[found.name], tensors["layers.1.engram.embed.scale"])
    assert list(table.differences(checkpoint)) == []
    table.rows[found.rows - 1, 143] ^= 1
    assert list(table.differences(checkpoint)) == [
        f"{found.name}: live row {found.rows - 1:,} is not the shard's"
    ]


class Engram:
    """vLLM 0.33.0's, as far as its table is concerned."""

    def _create_embedding(self, layout: Any, index: int) -> str:
        return f"vLLM's own table of layer {layout.layer_ids[index]}"


@pytest.fixture
def engram(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Engram]]:
    class Fresh(Engram):
        _create_embedding = Engram._create_embedding

    module: Any = types.ModuleType("vllm.models.deepseek_v41.common.engram")
    module.Engram = Fresh
    for name in ("", ".common", ".common.engram"):
        monkeypatch.setitem(sys.modules, f"vllm.models.deepseek_v41{name}", module)
    yield Fresh


def test_only_int4_tables_are_ours_and_twice_is_once(engram: type[Engram]) -> None:
    layout = types.SimpleNamespace(
        layer_ids=(1, 14), primes=(((2, 3), (5, 7)), ((11,),)), head_dim=256
    )

    def make(layer: int, **facts: Any) -> Any:
        return (layer, facts) if layer == 1 else None

    for _ in range(2):
        compat.replace_engram_table(make)
    assert engram()._create_embedding(layout, 0) == (1, {"head_sizes": (2, 3, 5, 7), "dim": 256})
    assert engram()._create_embedding(layout, 1) == "vLLM's own table of layer 14"


def test_an_exl3_head_is_loaded_as_its_dense_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (8, 16, 48)
    trellis = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
    suh, svh = torch.ones(128).half(), torch.full((256,), 0.1).half()
    norm = torch.ones(4)
    weights = [
        ("norm.weight", norm),
        ("head.trellis", trellis),
        ("head.suh", suh),
        ("head.svh", svh),
        ("head.mcg", torch.tensor(1)),
        ("embed.weight", norm),
    ]
    found = dict(dense_head(weights))
    assert list(found) == ["norm.weight", "embed.weight", "head.weight"]
    right = reference.dequantise(trellis, suh, svh, "mcg").T.bfloat16()
    assert found["head.weight"].shape == (256, 128) and torch.equal(found["head.weight"], right)
    with pytest.raises(ValueError, match="without svh"):
        list(dense_head(weights[:3]))
    plain = [("head.weight", norm)]
    assert list(dense_head(plain)) == plain
