"""Findings about settings that look right and are not, and differences between plans."""

from dataclasses import replace

import pytest
from machines import machine
from plan_builders import GIB, checkpoint, deepseek_v41_flash, gpu, host

from appliance.errors import UnsupportedError, UsageError
from appliance.plan.compare import diff_lines
from appliance.plan.guards import GUARDS, guard
from appliance.plan.model import Plan
from appliance.plan.planner import Policy, plan
from appliance.plan.routing import Heat

CARDS = machine("two-rtx-pro-6000-healthy")


@pytest.fixture(scope="module")
def flash() -> Plan:
    return plan(CARDS, deepseek_v41_flash(), None, Policy())


def found(made: Plan, **arguments: object) -> dict[str, str]:
    given = {name.replace("_", "-"): value for name, value in arguments.items()}
    return {f.check: f"{f.severity}: {f.saw}" for f in guard(made, CARDS, given)}


def test_every_guard_has_a_threshold_a_source_and_a_way_out(flash: Plan) -> None:
    assert len({row.id for row in GUARDS}) == len(GUARDS)
    for finding in guard(flash, CARDS, {"block-size": 64, "cpu-offload-gb": 8}):
        assert finding.fix and finding.threshold and finding.source


def test_kv_blocks_of_64_are_refused_and_128_is_unproved_on_this_card(flash: Plan) -> None:
    assert flash.serving.kv_block_tokens == 128
    assert found(flash)["kv-block-size"].startswith("warn: KV blocks of 128")
    assert found(flash, block_size=64)["kv-block-size"].startswith("fail: KV blocks of 64")
    hopper = gpu(0).model_copy(update={"compute_capability": "9.0"})
    other = plan(host((hopper,)), checkpoint(), None, Policy())
    assert other.serving.kv_block_tokens is None and "kv-block-size" not in found(other)


def test_graphs_must_cover_every_stream_with_its_draft_tokens(flash: Plan) -> None:
    assert "graph-capture-sizes" not in found(flash, cudagraph_capture_sizes=[1, 2, 4, 8])
    seen = found(flash, cudagraph_capture_sizes=[1, 2, 4, 8], num_speculative_tokens=3)
    assert "takes 8 rows and a step of 24 can come" in seen["graph-capture-sizes"]
    assert "graph-capture-sizes" not in found(flash, num_speculative_tokens=3)


def test_a_short_prefill_chunk_waits_for_the_link() -> None:
    short = plan(CARDS, deepseek_v41_flash(), None, Policy(prefill_chunk_tokens=1024))
    assert "prefill-chunk-covers-link" in found(short)
    enough = short.forecast.break_even_chunk_tokens if short.forecast else None
    assert enough is not None and 4096 < enough < 16384
    long = plan(CARDS, deepseek_v41_flash(), None, Policy(prefill_chunk_tokens=16384))
    assert "prefill-chunk-covers-link" not in found(long)


def test_native_offload_is_refused_with_the_reason(flash: Plan) -> None:
    assert "skips this plugin's experts" in found(flash, cpu_offload_gb=8)["native-offload"]
    assert "every step" in found(flash, offload_backend="prefetch")["native-offload"]
    assert "native-offload" not in found(flash, cpu_offload_gb=0)


def test_a_draft_model_beside_prefix_caching_is_warned_of(flash: Plan) -> None:
    assert "prefix-cache-with-draft" in found(flash, num_speculative_tokens=3)
    assert "prefix-cache-with-draft" not in found(
        flash, num_speculative_tokens=3, enable_prefix_caching=False
    )


def test_memory_that_just_fits_is_warned_of(flash: Plan) -> None:
    need = sum(rank.total_bytes("host") for rank in flash.ranks)
    tight = CARDS.model_copy(update={"memory_free_bytes": need + GIB})
    assert any("of the" in f.saw and f.check == "host-memory-margin" for f in guard(flash, tight))
    assert not [f for f in guard(flash, CARDS) if f.check == "host-memory-margin"]


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'strange' is of no family this release knows"):
        plan(host(), replace(checkpoint(model_type="strange"), family="unknown"), None, Policy())


def test_a_diff_names_experts_that_moved_bytes_and_the_effect(flash: Plan) -> None:
    counts = {i: tuple(float((e * 7 + i) % 101) for e in range(384)) for i in range(40)}
    after = plan(CARDS, deepseek_v41_flash(), Heat(counts), Policy(streams=4, conversations=8))
    lines = diff_lines(flash, after)
    text = "\n".join(lines)
    assert "made from another heat: none -> " in text and "streams: 6 -> 4" in text
    assert "experts to the device" in text and "  layer 0: " in text
    assert "KV cache (device) -" in text
    assert "4 streams: 31.0% -> " in text and "tokens/s each" in text
    assert diff_lines(flash, flash) == ["the plans are equal"]


def test_plans_of_different_models_cannot_be_compared(flash: Plan) -> None:
    other = plan(host(), replace(checkpoint(), digest="d" * 64), None, Policy())
    with pytest.raises(UsageError, match="different checkpoints"):
        diff_lines(flash, other)
