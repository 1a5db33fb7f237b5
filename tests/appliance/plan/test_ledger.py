"""The byte ledger: exact, and in agreement with the public figures of the reference deployment."""

import re
from dataclasses import replace

from machines import machine
from plan_builders import GIB, checkpoint, deepseek_v41_flash, expert, gpu, host, layer

from appliance.checkpoint.model import DensePart, Tensor
from appliance.engine import behind
from appliance.plan.budget import KEPT_SHARDS, Demand, activation_bytes
from appliance.plan.explain import ledger_lines, show_lines
from appliance.plan.kv import kv_cost
from appliance.plan.model import Plan, RankPlan
from appliance.plan.outline import Outline
from appliance.plan.planner import Policy, plan
from appliance.plan.split import scale_bytes, share_of

TWO_CARDS = machine("two-rtx-pro-6000-healthy")


def weights(rank: RankPlan) -> int:
    return sum(i.size_bytes for i in rank.ledger if (i.home, i.source) == ("device", "header"))


def held(made: Plan) -> int:
    return sum(len(p.device_experts) + p.cache_slots for p in made.ranks[0].layers)


def on_host(made: Plan) -> int:
    return sum(len(place.host_experts - place.slot_experts) for place in made.ranks[0].layers)


def test_experts_of_the_reference_model_weigh_what_the_public_says() -> None:
    assert expert(5120, 2304).size_bytes == 13_315_596
    total = sum(la.size_bytes for la in deepseek_v41_flash().layers)
    assert round(total / GIB, 2) == 190.48


def test_all_resident_the_reference_model_needs_about_102_gib_a_card() -> None:
    made = plan(TWO_CARDS, deepseek_v41_flash(), None, Policy())
    rank = made.ranks[0]
    size = {i.part: i.size_bytes for i in rank.ledger}
    moved = size["routed experts, on host"] - size["cache slots"]
    assert 101.6 < (weights(rank) + moved) / GIB < 102.4


def test_the_reference_plan_leaves_about_72_gib_of_weights_a_card() -> None:
    made = plan(TWO_CARDS, deepseek_v41_flash(), None, Policy())
    assert 71.4 < weights(made.ranks[0]) / GIB < 74
    assert 4_400 < on_host(made) < 4_950


def test_the_printed_ledger_says_what_does_not_fit_by_how_much_and_what_does() -> None:
    text = "\n".join(ledger_lines(plan(TWO_CARDS, deepseek_v41_flash(), None, Policy())))
    does_not = re.findall(r"all experts resident: .* does not fit, ([\d.]+) GiB too much", text)
    does = re.findall(r"this plan: .* ([\d,]+) of 15,360 experts on the host", text)
    assert len(does_not) == len(does) == 2
    assert float(does_not[0]) > 20


def test_prefill_has_a_ring_of_24_blocks_for_each_size_of_expert_among_the_layers() -> None:
    wide = [expert(5120, 2304, bits) for bits in (3, 4, 3)]
    layers = tuple(layer(i, 64, 6, shape) for i, shape in enumerate(wide))
    made = plan(TWO_CARDS, checkpoint(layers), None, Policy(context_tokens=4096))
    (line,) = (i for i in made.ranks[0].ledger if i.part == "prefill buffers")
    # Halves of 3 * 5120 * 2304 weights at 3 and at 4 bits, in whole pages of 4 KiB.
    assert line.size_bytes == 24 * (6_635_520 + 8_847_360)
    assert line.note == "24 blocks of 8,847,360 B and of 6,635,520 B"


def test_the_page_cache_of_loading_is_that_of_as_many_shards_as_the_reader_keeps() -> None:
    assert KEPT_SHARDS == behind.KEPT
    for shard, kept in ((GIB, 2 * GIB), (3 * GIB, 6 * GIB), (5 * GIB, 8 * GIB)):
        tensors = {name: Tensor(name, "U8", (shard,), name, 0, shard) for name in "abc"}
        made = plan(TWO_CARDS, replace(checkpoint(), tensors=tensors), None, Policy())
        peaks = [i.size_bytes for r in made.ranks for i in r.ledger if i.part == "load peak"]
        assert peaks == [kept // 2] * 2


def test_matrices_made_dense_at_load_take_two_bytes_a_weight_beside_their_stored_form() -> None:
    """DeepSeek-V4 reads wo_a itself, V4.1 its head, latent attention absorbs kv_b_proj: 4096 x
    8192, 5120 x 129,280 and 512 x 16,384 weights. Layer 2 is a draft layer, which is not loaded."""
    shapes = {"layers.0.attn.wo_a": (256, 512), "layers.1.attn.wo_a": (256, 512),
              "layers.1.attn.wo_b": (512, 320), "mtp.0.attn.wo_a": (256, 512),
              "head": (320, 8080), "model.layers.1.self_attn.kv_b_proj": (32, 1024),
              "model.layers.2.self_attn.kv_b_proj": (32, 1024)}  # fmt: skip
    tensors = {f"{name}.trellis": Tensor(f"{name}.trellis", "I16", (*shape, 48), "a", 0, 0)
               for name, shape in shapes.items()}  # fmt: skip
    latent, v4 = 512 * 16_384, 2 * 4096 * 8192
    layers = (layer(0), layer(1), layer(2, draft=True))
    for model_type, weights in (("deepseek_v41", latent + v4 + 5120 * 129_280),
                                ("deepseek_v4", latent + v4), ("deepseek_v3", latent)):  # fmt: skip
        model = replace(checkpoint(layers, model_type=model_type), tensors=tensors)
        for known in (model, Outline.of(model).checkpoint(model.path)):
            made = plan(TWO_CARDS, known, None, Policy(context_tokens=4096))
            found = [i.size_bytes for r in made.ranks for i in r.ledger if "made dense" in i.part]
            assert found == [weights] * 2  # halves, of two bytes each


def test_the_printed_bytes_add_up_to_the_printed_sums() -> None:
    made = plan(TWO_CARDS, deepseek_v41_flash(), None, Policy())
    for section in "\n".join(ledger_lines(made)).split("  device\n")[1:]:
        device = section.split("  host\n")[0]
        found = re.findall(r" ([\d,]+) B +[\d.]+ [GMK]iB", device)
        *lines, summed, capacity = (int(size.replace(",", "")) for size in found)
        assert sum(lines) == summed and capacity == made.ranks[0].device_capacity_bytes


def test_a_small_ledger_keeps_its_digits_and_says_each_thing_once() -> None:
    dense = tuple(DensePart("attention", size, cut) for size, cut in ((2048, False), (4096, True)))
    small = checkpoint(dense=dense)
    text = "\n".join(ledger_lines(plan(host(), small, None, Policy(host_share=0.5))))
    assert "0.00 GiB" not in text
    assert re.findall(r"attention +([\d,]+) B +(.+?)  header", text) == [("6,144", "6.0 KiB")]
    two = Policy(host_share=0.5, tensor_parallel=2)
    both = ledger_lines(plan(host((gpu(0), gpu(1))), small, None, two))
    assert sum("attention" in line for line in both) == 4, "cut and whole are two things"


def test_without_a_gpu_the_ledger_adds_up_what_is_one_ram() -> None:
    made = plan(host(), checkpoint(), None, Policy(host_share=0.5))
    (line,) = [line for line in ledger_lines(made) if "both, of one RAM" in line]
    total = sum(made.ranks[0].total_bytes(home) for home in ("device", "host"))
    assert f" {total:,} B " in line


def test_what_each_memory_node_pins_is_summed_over_its_ranks() -> None:
    made = plan(TWO_CARDS, deepseek_v41_flash(), None, Policy())
    text = "\n".join(ledger_lines(made))
    nodes = text[text.index("memory node 0, ranks 0, 1") :]
    pinned = [int(n.replace(",", "")) for n in re.findall(r" ([\d,]+) B ", nodes)]
    lines = [i for rank in made.ranks for i in rank.ledger if i.pinned]
    assert sum(pinned) == sum(i.size_bytes for i in lines)
    assert {i.part for i in lines} == {"routed experts, on host", "lookup tables"}


def test_shares_of_any_size_add_up_exactly() -> None:
    for size in (0, 1, 7, 103 * GIB + 1):
        assert sum(share_of(size, rank, 3) for rank in range(3)) == size


def test_tensor_parallel_scales_are_cut_where_the_weights_are() -> None:
    shape = expert(5120, 2304)
    # gate and up: suh whole, svh cut; down: suh cut, svh whole; three markers of 4 bytes.
    assert scale_bytes(shape, 2) == 2 * 2 * (5120 + 1152) + 2 * (1152 + 5120) + 12
    assert scale_bytes(shape, 1) == shape.size_bytes - shape.trellis_bytes


def test_activations_agree_with_a_peers_measurement() -> None:
    demand = Demand(deepseek_v41_flash(), 2, False, 262_144, 12, Policy())
    assert abs(activation_bytes(demand) / GIB - 1.04) < 0.1


def test_a_vocabulary_that_is_no_number_of_tokens_takes_nothing() -> None:
    known, *unknown = (
        activation_bytes(Demand(checkpoint(vocab_size=size), 1, False, 128, 1, Policy(streams=6)))
        for size in (1000, None, -(10**15), True, "many")
    )
    assert [known - size for size in unknown] == [4 * 6 * 1000] * 4


def test_a_latent_cache_is_whole_on_every_rank_and_heads_are_shared() -> None:
    latent = checkpoint(kv_lora_rank=512, qk_rope_head_dim=64, num_hidden_layers=60)
    assert kv_cost(latent, 4).bytes_per_token == 60 * 576 * 2
    sparse = checkpoint(kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
    assert kv_cost(sparse, 1).bytes_per_token == 2 * (576 * 2 + 132)
    grouped = checkpoint(num_key_value_heads=4, head_dim=128, num_hidden_layers=48)
    assert kv_cost(grouped, 2).bytes_per_token == 2 * 48 * 2 * 128 * 2
    assert kv_cost(grouped, 8).bytes_per_token == 2 * 48 * 1 * 128 * 2
    # fp8 takes a byte a value; beside an indexer vLLM's fp8_ds_mla keeps 656 B for 512 + 64.
    assert kv_cost(latent, 4, fp8=True).bytes_per_token == 60 * 576
    assert kv_cost(sparse, 1, fp8=True).bytes_per_token == 2 * (656 + 132)
    assert kv_cost(grouped, 2, fp8=True).bytes_per_token == 2 * 48 * 2 * 128


def test_the_cache_is_that_of_the_language_model_wherever_its_settings_are_nested() -> None:
    own = {"num_hidden_layers": 12, "num_key_value_heads": 4, "head_dim": 128}
    for key in ("text_config", "language_config", "llm_config"):
        nested = replace(checkpoint(), config={key: own, "num_hidden_layers": 2})
        assert kv_cost(nested, 1).bytes_per_token == 2 * 12 * 4 * 128 * 2
        float32 = replace(nested, config={**nested.config, "torch_dtype": "float32"})
        assert kv_cost(float32, 1).bytes_per_token == 2 * 12 * 4 * 128 * 4


def test_an_fp8_cache_is_half_and_what_it_frees_holds_experts() -> None:
    asked = Policy(context_tokens=4096, conversations=40, streams=4)
    many = checkpoint((layer(0, 64, 2, expert(8192, 8192)), layer(1, 64, 2, expert(8192, 8192))),
                      num_key_value_heads=64, head_dim=256)  # fmt: skip
    card = host((gpu(0, memory=32 * GIB),))
    auto, fp8 = (plan(card, many, None, replace(asked, kv_dtype=kind)) for kind in ("auto", "fp8"))
    assert 2 * (fp8.serving.kv_bytes_per_token or 0) == auto.serving.kv_bytes_per_token
    assert fp8.serving.kv_cache_bytes * 2 == auto.serving.kv_cache_bytes
    assert fp8.serving.kv_cache_dtype == "fp8" and auto.serving.kv_cache_dtype == "auto"
    assert held(fp8) > held(auto)


def test_linear_attention_layers_keep_no_keys() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    hybrid = checkpoint(num_hidden_layers=4, layer_types=kinds, num_key_value_heads=2, head_dim=64)
    assert kv_cost(hybrid, 1).bytes_per_token == 2 * 1 * 2 * 64 * 2


def test_without_a_gpu_the_engine_computes_in_float32_and_so_is_the_cache() -> None:
    bf16 = kv_cost(checkpoint(), 1).bytes_per_token
    made = plan(host(), checkpoint(), None, Policy())
    assert made.serving.kv_bytes_per_token == 2 * bf16


def test_a_context_nobody_asked_for_never_takes_most_of_the_device() -> None:
    small = host(memory=32 * GIB)
    hungry = checkpoint(max_position_embeddings=262_144, num_key_value_heads=8, head_dim=512)
    made = plan(small, hungry, None, Policy())
    assert made.serving.context_tokens < 262_144
    assert made.serving.kv_cache_bytes <= 8 * GIB
    assert any("a context of" in note and "was chosen" in note for note in made.notes)


def test_draft_layers_cost_nothing_until_they_are_asked_for() -> None:
    drafted = checkpoint((layer(0), layer(1, draft=True)))
    without = plan(host(), drafted, None, Policy())
    with_draft = plan(host(), drafted, None, Policy(draft=True))
    grown = with_draft.ranks[0].total_bytes("device") - without.ranks[0].total_bytes("device")
    assert grown > 8 * drafted.layers[1].experts[0].trellis_bytes
    assert [la.layer for la in with_draft.ranks[0].layers] == [0, 1]
    assert with_draft.ranks[0].layers[1].host == ""


def test_the_summary_names_homes_predictions_and_notes() -> None:
    text = "\n".join(show_lines(plan(TWO_CARDS, deepseek_v41_flash(), None, Policy())))
    assert "4 streams" in text and "on the host" in text and "note: routing counts are" in text
