"""Every impossible request is one sentence with the numbers and the way out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from plan_builders import GIB, checkpoint, deepseek_v41_flash, expert, gpu, host, layer

from appliance.checkpoint.model import Checkpoint, ExpertShape, MoeLayer
from appliance.errors import ApplianceError, DoesNotFit, PlanError, UnsupportedError, UsageError
from appliance.plan.budget import PREFILL_ROWS, PREFILL_SLOTS, PREFILL_WINDOW
from appliance.plan.check import check_plan
from appliance.plan.guards import guard
from appliance.plan.model import LayerPlacement, load_plan
from appliance.plan.planner import Policy, plan
from appliance.plan.refuse import MOST_EXPERTS, MOST_PICKED
from appliance.plan.routing import Heat, heat_from_json
from expert_kernels import launch
from preflight.host import Host, HugePages, NumaNode

HALF = Policy(host_share=0.5)
CARDS = host((gpu(0), gpu(1), gpu(2), gpu(3)))


def mixed() -> MoeLayer:
    return MoeLayer(0, "p", ("w1", "w3", "w2"), (expert(bits=3), expert(bits=4)), 1)


def two_codebooks() -> MoeLayer:
    mcg, mul1 = expert(codebook="mcg"), expert(codebook="mul1")
    return layer(shape=ExpertShape(mcg.gate, mcg.up, mul1.down))


def biased() -> MoeLayer:
    plain = expert()
    return layer(shape=replace(plain, down=replace(plain.down, bias=True)))


Case = tuple[Host, Checkpoint, Policy, type[ApplianceError], str]
CASES: dict[str, Callable[[], Case]] = {
    "not EXL3": lambda: (host(), checkpoint(quantisation="fp8"), HALF,
                         UnsupportedError, "stored as fp8, not as EXL3"),
    "no experts": lambda: (host(), checkpoint((), quantisation="none"), HALF, UnsupportedError,
                           "no routed experts"),
    "a shard of 576": lambda: (
        CARDS, deepseek_v41_flash(), Policy(tensor_parallel=4), UnsupportedError,
        r"2304 cut for 4 ranks are 576 wide, no multiple of 128.*expert parallelism"),
    "experts that do not divide": lambda: (
        host(), checkpoint((layer(experts=9),)), Policy(tensor_parallel=2, expert_parallel=True),
        UnsupportedError, "9 experts, which 2 ranks cannot share evenly"),
    "heads that do not divide": lambda: (
        host(), checkpoint(num_attention_heads=7), Policy(tensor_parallel=2), UnsupportedError,
        "7 attention heads cannot be shared by 2"),
    "key heads that do not divide": lambda: (
        host(), checkpoint((layer(shape=expert(inner=384)),), num_attention_heads=48,
                           num_key_value_heads=8), Policy(tensor_parallel=3), UnsupportedError,
        "8 key-value heads can be neither shared nor repeated evenly by 3"),
    "more experts than kernels route": lambda: (
        CARDS, checkpoint((layer(experts=2052),)), Policy(tensor_parallel=2), UnsupportedError,
        "2,052 experts on each card and picks 2 .* take 1,024 and 32.*expert parallelism over"),
    "as many on each of two cards": lambda: (
        CARDS, checkpoint((layer(experts=2052),)), Policy(tensor_parallel=2, expert_parallel=True),
        UnsupportedError, "1,026 experts on each card"),
    "more picks than kernels route": lambda: (
        CARDS, checkpoint((layer(experts=64, top_k=33),)), Policy(tensor_parallel=2),
        UnsupportedError,
        "64 experts on each card and picks 33 of them"),
    "more slots than experts": lambda: (
        host(), checkpoint(), Policy(cache_slots=9), UsageError,
        "9 cache slots a layer are asked for, and a layer has 8 experts on each rank.*leave it"),
    "more slots than a rank's experts": lambda: (
        host(), checkpoint(), Policy(cache_slots=5, tensor_parallel=2, expert_parallel=True),
        UsageError, "a layer has 4 experts on each rank"),
    "mixed K": lambda: (host(), checkpoint((mixed(),)), HALF, UnsupportedError,
                        r"mixes w1 of 256 x 256 at 3 bits mcg \(expert 0\).* 4 bits"),
    "files cut for two": lambda: (host(), checkpoint(rank_sliced=2), HALF, UnsupportedError,
                                  "is sliced for tensor parallelism 2, not 1"),
    "files cut for these two": lambda: (
        CARDS, checkpoint(rank_sliced=2), Policy(tensor_parallel=2), UnsupportedError,
        "experts cut for 2 ranks in its files; this engine reads whole experts"),
    "two codebooks in a layer": lambda: (
        host(), checkpoint((layer(0), replace(two_codebooks(), index=1))), HALF, UnsupportedError,
        r"layer 1 has projections of several codebooks \(gate_proj mcg, up_proj mcg, down_proj "
        r"mul1\): the kernels take one"),
    "experts with biases": lambda: (
        host(), checkpoint((biased(),)), HALF, UnsupportedError,
        "layer 0: down_proj of expert 0 has a bias, which the kernels do not add"),
    "unknown attention": lambda: (
        host(), checkpoint(num_key_value_heads=None, num_attention_heads=None), HALF,
        UnsupportedError, "the attention of model type 'qwen3_moe' is not one"),
    "heads of no width": lambda: (
        host(), checkpoint(hidden_size=4, head_dim=None), HALF, UnsupportedError,
        "config.json has neither kv_lora_rank nor num_key_value_heads with head_dim"),
    "more GPUs than there are": lambda: (
        host((gpu(0),)), checkpoint(), Policy(tensor_parallel=2), PlanError,
        "2 GPUs asked for and the host has 1"),
    "a GPU on a host without": lambda: (host(), checkpoint(), Policy(device="cuda"), PlanError,
                                        "1 GPU asked for and the host has 0"),
    "GPUs nobody looked for": lambda: (host(None), checkpoint(), Policy(), PlanError,
                                       "nobody could look for GPUs"),
    "GPU memory unknown": lambda: (host((gpu(0, memory=None),)), checkpoint(), Policy(), PlanError,
                                   "memory of GPU 0 could not be read.*--device-memory"),
    "more device memory than there is": lambda: (
        host((gpu(0),)), checkpoint(), Policy(device_capacity_bytes=200 * GIB), PlanError,
        "asks for 214,748,364,800 bytes and GPU 0 has"),
    "all resident": lambda: (
        host((gpu(0), gpu(1))), deepseek_v41_flash(), Policy(host_share=0), DoesNotFit,
        r"card 0 needs 12\d\.\d\d GiB with every expert resident and has 95.59 GiB: 2\d.*"
        r"leave at least 4,\d\d\d of its 15,360 experts"),
    "too small for the rest": lambda: (
        host((gpu(0, memory=8 * GIB), gpu(1, memory=8 * GIB))), deepseek_v41_flash(), Policy(),
        DoesNotFit, "card 0 needs .* GiB before its first expert .* and has 8.00 GiB"),
    "host memory short": lambda: (
        host((gpu(0), gpu(1)), memory=128 * GIB), deepseek_v41_flash(), Policy(), DoesNotFit,
        r"takes 16\d\.\d\d GiB of host memory over 2 ranks and 128.00 GiB are free"),
    "control group short": lambda: (
        host((gpu(0), gpu(1)), memory_max=96 * GIB), deepseek_v41_flash(), Policy(), DoesNotFit,
        "the control group allows 96.00 GiB more"),
    "one memory node short": lambda: (
        host((gpu(0), gpu(1)), memory=200 * GIB, nodes=4), deepseek_v41_flash(), Policy(),
        DoesNotFit, r"memory node 0 has 50.00 GiB free and the experts and 103.00 GiB of lookup "
        r"tables of 2 cards beside it take 1\d\d\.\d\d GiB"),
    "a context the model was not made for": lambda: (
        host(), checkpoint(), Policy(context_tokens=5000), UsageError,
        "5,000 tokens is asked for and the model was made for 4,096"),
    "a GPU that is lost": lambda: (
        host((gpu(0).model_copy(update={"fault": "GPU is lost"}),)), checkpoint(), Policy(),
        PlanError, "GPU 0 cannot be used: GPU is lost"),
    "a GPU in pieces": lambda: (
        host((gpu(0).model_copy(update={"mig_enabled": True}),)), checkpoint(), Policy(),
        PlanError, "GPU 0 is split into MIG instances.*-mig 0"),
    "link rates that do not match": lambda: (
        host(), checkpoint(), Policy(link_bytes_per_second=(1e9, 1e9)), UsageError,
        "2 link rates given for 1 rank"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_served_is_refused_with_numbers(name: str) -> None:
    machine, model, policy, kind, sentence = CASES[name]()
    with pytest.raises(kind, match=sentence):
        plan(machine, model, None, policy)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"streams": 0}, "streams is 0"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"device_capacity_bytes": -1}, "device_capacity_bytes is -1"),
        ({"cache_slots": -1}, "cache_slots is -1"),
        ({"host_share": 1.5}, "host_share is 1.5"),
        ({"host_share": float("nan")}, "host_share is nan"),
        ({"link_bytes_per_second": (float("inf"),)}, "a link of inf bytes"),
        ({"link_bytes_per_second": (float("nan"),)}, "a link of nan bytes"),
        ({"link_bytes_per_second": (50,)}, "a link of 50 bytes.*50e9 for 50 GB/s"),
        ({"link_bytes_per_second": (1e-300,)}, "a link of 1e-300 bytes"),
        ({"conversations": 2, "streams": 4}, "2 conversations cannot feed 4 streams"),
    ],
)
def test_requests_that_make_no_sense_are_refused(bad: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Policy(**bad)  # type: ignore[arg-type]


def test_heat_with_holes_is_refused() -> None:
    with pytest.raises(UsageError, match="say nan for layer 3 expert 1"):
        Heat({3: (1.0, float("nan"))})
    with pytest.raises(UsageError, match="say -1 for layer 0 expert 0"):
        Heat({0: (-1,)})


def test_counts_of_another_model_are_refused() -> None:
    with pytest.raises(UsageError, match="give layer 7 2 experts and the model's has no routed"):
        plan(host(), checkpoint(), Heat({7: (1, 1)}), HALF)


def test_heat_survives_its_own_json_and_nothing_else_is_read() -> None:
    heat = Heat({1: (1.0, 2.5), 0: (0.0, 3.0)})
    assert heat_from_json(heat.to_json()) == heat
    for text in ("{", "[]", '{"schema_version": 2, "layers": {}}',
                 '{"schema_version": 1, "layers": {"x": [1]}}',
                 '{"schema_version": 1, "layers": {"0": ["a"]}}',
                 '{"schema_version": 1, "layers": {}, "more": 1}'):  # fmt: skip
        with pytest.raises(UsageError):
            heat_from_json(text)


def test_what_the_planner_knows_of_the_kernels_is_what_they_say() -> None:
    assert (MOST_EXPERTS, PREFILL_SLOTS, PREFILL_WINDOW, PREFILL_ROWS) == (
        launch.MAX_EXPERTS, launch.PREFILL_SLOTS, launch.PREFILL_WINDOW, launch.PREFILL_ROWS
    )  # fmt: skip
    source = Path(launch.__file__).parents[1] / "csrc" / "experts.cu"
    assert f"c.top_k > {MOST_PICKED} ||" in source.read_text()


def test_a_host_without_a_gpu_routes_any_number_and_four_cards_share_them() -> None:
    many = checkpoint((layer(experts=2052),))
    plan(host(), many, None, HALF)
    plan(CARDS, many, None, Policy(tensor_parallel=4, expert_parallel=True))


def test_draft_layers_that_are_not_loaded_refuse_nothing() -> None:
    target, draft = layer(0, experts=8), layer(1, experts=6, draft=True)
    split = Policy(tensor_parallel=4, expert_parallel=True, host_share=0.5)
    made = plan(host(), checkpoint((target, draft)), None, split)
    assert [r.layers[0].device for r in made.ranks] == ["0", "2", "4", "6"]
    with pytest.raises(UnsupportedError, match="layer 1 has 6 experts, which 4 ranks cannot"):
        plan(host(), checkpoint((target, draft)), None, replace(split, draft=True))


def test_tables_of_int4_rows_count_on_the_node_of_their_cards_and_others_do_not() -> None:
    """The engine binds its int4 tables where it binds experts: 103 GiB of them beside 57 GiB of
    experts pass 128 GiB, and the kernel would kill."""
    two_nodes = host((gpu(0), gpu(1)), memory=256 * GIB, nodes=2)
    with pytest.raises(DoesNotFit, match=r"memory node 0 has 128.00 GiB free .* of 2 cards beside"):
        plan(two_nodes, deepseek_v41_flash(), None, Policy())
    other = deepseek_v41_flash()
    other = replace(other, tables=tuple(replace(t, format="fp8") for t in other.tables))
    made = plan(two_nodes, other, None, Policy())
    bound = sum(i.size_bytes for r in made.ranks for i in r.ledger
                if i.part == "routed experts, on host")  # fmt: skip
    assert bound <= 0.8 * 128 * GIB


def test_copies_for_slots_leave_the_node_room_for_its_tables() -> None:
    made = plan(host((gpu(0), gpu(1)), memory=440 * GIB), deepseek_v41_flash(), None, Policy())
    bound = sum(i.size_bytes for r in made.ranks for i in r.ledger if i.pinned)
    assert 0.78 * 220 * GIB < bound <= 0.8 * 220 * GIB  # slots take what room there is


def test_memory_held_by_the_page_cache_is_not_free_but_the_way_out_is_told() -> None:
    cached = host((gpu(0), gpu(1))).model_copy(update={"memory_free_bytes": 4 * GIB})
    with pytest.raises(DoesNotFit, match=r"4\.00 GiB are free.*/drop_caches"):
        plan(cached, deepseek_v41_flash(), None, Policy())


def test_slots_that_the_host_cannot_back_say_what_their_copies_take() -> None:
    short = host((gpu(0), gpu(1)), memory=176 * GIB, nodes=1)
    plan(short, deepseek_v41_flash(), None, Policy())
    with pytest.raises(DoesNotFit, match=r"fewer cache slots: their copies on the host are 47\.46"):
        plan(short, deepseek_v41_flash(), None, Policy(cache_slots=96))


def test_no_share_is_the_way_out_of_a_host_without_gpus_that_is_too_small() -> None:
    """Both homes are RAM, so moving experts between them frees nothing."""
    large = checkpoint((layer(experts=1024, shape=expert(8192, 10240)),))
    small = host(memory=24 * GIB)
    sizes = r"takes 93\.\d\d GiB, 90\.00 of it experts, and it has 24\.00 GiB: 69\.\d\d GiB short"
    way_out = "serve a smaller model, or use a machine with more memory"
    for policy in (Policy(), Policy(host_share=0.2), HALF):
        with pytest.raises(DoesNotFit, match=sizes) as said:
            plan(small, large, None, policy)
        assert said.value.fix == way_out
    for policy in (Policy(host_share=1.0), Policy(host_share=0.2, device_capacity_bytes=9 * GIB)):
        with pytest.raises(DoesNotFit, match=r"24\.00 GiB are available: 69\.\d\d GiB") as said:
            plan(small, large, None, policy)
        assert said.value.fix == way_out


def test_the_way_out_of_too_many_residents_is_taken_before_it_is_named() -> None:
    """Leaving out --host-share helps where the host holds the rest, and is not said elsewhere."""
    large = checkpoint((layer(experts=512, shape=expert(8192, 8192 + 2048)),))
    card = gpu(0, memory=24 * GIB)
    share = Policy(host_share=0.1, device="cuda")
    with pytest.raises(DoesNotFit, match=r"with 90% of the experts resident.*leave out --host-sh"):
        plan(host((card,)), large, None, share)
    plan(host((card,)), large, None, replace(share, host_share=None))
    with pytest.raises(DoesNotFit, match=r"GiB of host memory over 1 rank.*GiB short.*add memory"):
        plan(host((card,), memory=16 * GIB, nodes=1), large, None, share)


def test_reserved_huge_pages_are_memory_for_the_arena_though_no_longer_free() -> None:
    """As `tune --huge-pages` leaves a host: the pages are out of MemFree, and the engine takes them
    where all that it binds to the node fits into them, else none."""
    cards = (gpu(0), gpu(1))
    made = plan(host(cards, nodes=1), deepseek_v41_flash(), None, Policy(cache_slots=0))
    pages = [-(-i.size_bytes // (2 << 20)) for r in made.ranks for i in r.ledger if i.pinned]
    rest = sum(i.size_bytes for r in made.ranks for i in r.ledger if i.home == "host")
    rest -= sum(i.size_bytes for r in made.ranks for i in r.ledger if i.pinned)

    def tuned(count: int, page_bytes: int = 2 << 20) -> Host:
        reserved = (HugePages(page_bytes=page_bytes, total=count, free=count),)
        node = NumaNode(index=0, memory_total_bytes=256 * GIB, memory_free_bytes=rest + GIB,
                        huge_pages=reserved)  # fmt: skip
        return host(cards, memory=256 * GIB, nodes=1).model_copy(
            update={"memory_free_bytes": rest + GIB, "numa_nodes": (node,)}
        )

    again = plan(tuned(sum(pages)), deepseek_v41_flash(), None, Policy(cache_slots=0))
    assert again.ranks == made.ranks
    assert not [f for f in guard(again, tuned(sum(pages))) if f.check == "host-memory-margin"]
    for short in (tuned(sum(pages) - 1), tuned(sum(pages), page_bytes=1 << 30)):
        with pytest.raises(
            DoesNotFit, match=r"takes 1\d\d\.\d\d GiB of host memory over 2 ranks and"
        ):
            plan(short, deepseek_v41_flash(), None, Policy(cache_slots=0))
    little = tuned(sum(pages)).model_copy(update={"memory_free_bytes": GIB})
    with pytest.raises(
        DoesNotFit, match=r"over 2 ranks beside 1\d\d\.\d\d GiB of reserved huge pag"
    ):
        plan(little, deepseek_v41_flash(), None, Policy(cache_slots=0))


def test_an_fp8_cache_takes_a_card_that_computes_in_fp8() -> None:
    old = gpu(0).model_copy(update={"compute_capability": "8.0"})
    with pytest.raises(UnsupportedError, match=r"compute capability 8\.0, and a KV cache of fp8"):
        plan(host((old,)), checkpoint(), None, Policy(kv_dtype="fp8"))
    with pytest.raises(UnsupportedError, match="without a GPU keeps its KV cache in float32"):
        plan(host(), checkpoint(), None, Policy(kv_dtype="fp8"))
    plan(host((gpu(0),)), checkpoint(), None, Policy(kv_dtype="fp8"))
    with pytest.raises(UsageError, match="kv_dtype is 'fp4': auto and fp8 are known"):
        Policy(kv_dtype="fp4")  # type: ignore[arg-type]


def test_a_plan_for_another_checkpoint_or_gpu_is_refused() -> None:
    machine, model = host((gpu(0),)), checkpoint()
    made = plan(machine, model, None, HALF)
    check_plan(made, machine, model)
    other = made.made_from.model_copy(update={"checkpoint": "d" * 64})
    with pytest.raises(PlanError, match="made for another checkpoint"):
        check_plan(made.model_copy(update={"made_from": other}), machine, model)
    with pytest.raises(PlanError, match="is for GPU GPU-0, which is not here"):
        check_plan(made, host((gpu(5),)), model)
    with pytest.raises(PlanError, match="has 1,073,741,824 bytes and the plan counts on"):
        check_plan(made, host((gpu(0, memory=GIB),)), model)


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (LayerPlacement(layer=0, device="0-4", host="4-7"), "expert 4 has two homes"),
        (LayerPlacement(layer=0, device="0-3", host="4-6"), "expert 7 has no home"),
        (LayerPlacement(layer=0, device="0-3", host="4-8"), "expert 8 is not this rank's"),
        (LayerPlacement(layer=0, device="0-4", host="5-7"), "the ledger says"),
        (LayerPlacement(layer=9, device="0-4", host="5-7"), r"layer \[0\] is missing"),
    ],
)
def test_a_plan_edited_into_nonsense_is_refused(first: LayerPlacement, sentence: str) -> None:
    made = plan(host(), checkpoint(), None, HALF)
    layers = (first, *made.ranks[0].layers[1:])
    edited = made.ranks[0].model_copy(update={"layers": layers})
    with pytest.raises(PlanError, match=sentence):
        check_plan(made.model_copy(update={"ranks": (edited,)}), host(), checkpoint())


@pytest.mark.parametrize(
    ("ranks", "kv_bytes", "sentence"),
    [
        ((1, 0), None, r"numbers its ranks \[1, 0\], and they are 0 to 1 in that order"),
        ((0, 0), None, r"numbers its ranks \[0, 0\]"),
        ((0, 1), 1 << 40, "KV cache and the engine is told 1,099,511,627,776"),
    ],
)
def test_ranks_out_of_place_and_another_kv_cache_are_refused(
    ranks: tuple[int, int], kv_bytes: int | None, sentence: str
) -> None:
    machine = host((gpu(0), gpu(1)))
    made = plan(machine, checkpoint(), None, HALF)
    edited = made.model_copy(update={"ranks": tuple(made.ranks[i] for i in ranks)})
    if kv_bytes is not None:
        told = made.serving.model_copy(update={"kv_cache_bytes": kv_bytes})
        edited = edited.model_copy(update={"serving": told})
    with pytest.raises(PlanError, match=sentence):
        check_plan(edited, machine, checkpoint())


def test_two_ranks_on_one_gpu_are_refused() -> None:
    machine = host((gpu(0), gpu(1)))
    made = plan(machine, checkpoint(), None, HALF)
    moved = made.ranks[1].model_copy(update={"gpu": "GPU-0"})
    with pytest.raises(PlanError, match="gives two ranks the same GPU: GPU-0, GPU-0"):
        check_plan(made.model_copy(update={"ranks": (made.ranks[0], moved)}), machine, checkpoint())


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"0-3"', '"0-99999999999"', "'0-99999999999' is not a list of expert numbers"),
        ('"schema_version": 1', f'"schema_version": {"9" * 5000}', "is not JSON: it holds what no"),
        ("{", "[" * 100_000, "is not JSON: it holds what no plan does"),
        ('"link_bytes_per_second": null', '"link_bytes_per_second": -5', "greater than 0"),
        ('"link_bytes_per_second": null', '"link_bytes_per_second": NaN', "a finite number"),
        ('"cache": null', '"cache": {"half_life_rows": Infinity}', "a finite number"),
        ('"cache": null', '"cache": {"promotions_per_row": 1e308}', "less than or equal to 1000"),
    ],
)
def test_a_plan_that_no_planner_wrote_is_a_sentence(
    tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    file = tmp_path / "plan.json"
    text = plan(host(), checkpoint(), None, HALF).to_json()
    file.write_text(text.replace(old, new, 1))
    assert file.read_text() != text
    with pytest.raises(PlanError, match=sentence):
        check_plan(load_plan(file), host(), checkpoint())


def test_a_plan_that_breaks_off_is_told_with_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{\n  "x')
    with pytest.raises(PlanError, match=r"Unterminated string starting at: line 2 column 3 \("):
        load_plan(file)
