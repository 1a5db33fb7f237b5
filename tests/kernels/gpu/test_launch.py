"""How the CUDA kernels are launched follows from the shape, and fits the machine."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_kernels import launch, prefill_schedule, staging

SHAPES = [(5120, 2304), (5120, 1152), (7168, 2048), (4096, 2048), (2560, 640), (128, 128)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("architecture", ["sm_90", "sm_120"])
def test_every_number_of_tokens_has_room_for_its_rows(
    shape: tuple[int, int], architecture: str
) -> None:
    for tokens in range(1, launch.MAX_TOKENS + 1):
        plan = launch.decode(tokens, *shape, 132, architecture, top_k=6)
        assert tokens <= 8 * plan.groups < max(16, 2 * tokens + 8)


@given(
    tokens=st.integers(1, 64),
    hidden=st.integers(1, 64).map(lambda n: 128 * n),
    inner=st.integers(1, 64).map(lambda n: 128 * n),
    count=st.integers(1, 200),
    architecture=st.sampled_from(["sm_90", "sm_120", "sm_86"]),
)
def test_blocks_fit_the_multiprocessors_they_are_meant_for(
    tokens: int, hidden: int, inner: int, count: int, architecture: str
) -> None:
    plan = launch.decode(tokens, hidden, inner, count, architecture, top_k=6)
    resident = plan.blocks // count
    assert plan.blocks == resident * count and resident in (1, 2)
    need = launch.shared_bytes(plan.groups, architecture)
    assert resident * need <= launch._SHARED_OF_ONE.get(architecture, 100 << 10)
    assert 1 <= plan.host_blocks <= plan.blocks


def test_two_blocks_share_a_multiprocessor_of_an_h200_and_one_has_that_of_a_smaller_card() -> None:
    for groups in (1, 2, 4, 8):
        assert launch.decode(8 * groups, 5120, 2304, 132, "sm_90", top_k=6).blocks == 264
        assert launch.decode(8 * groups, 5120, 2304, 188, "sm_120", top_k=6).blocks == 188


@given(
    hidden=st.integers(1, 64).map(lambda n: 128 * n),
    inner=st.integers(1, 64).map(lambda n: 128 * n),
)
def test_a_part_of_k_never_gets_too_short_to_fill_the_pipeline(hidden: int, inner: int) -> None:
    plan = launch.decode(1, hidden, inner, 132, top_k=6)
    assert plan.split_a == 1 or hidden // plan.split_a >= launch.SHORTEST


def test_few_experts_are_cut_into_more_units_than_there_are_multiprocessors() -> None:
    plan = launch.decode(1, 5120, 2304, 132, top_k=1)
    assert 2304 // 128 * plan.split_a > 132 and 5120 // 128 * plan.split_b > 132
    many = launch.decode(64, 5120, 2304, 132, top_k=6)
    assert (many.split_a, many.split_b) == (1, 1)


@pytest.mark.parametrize(
    ("shape", "tokens", "top_k", "parts"),
    [
        ((5120, 2304), 1, 1, (14, 6)),
        ((7168, 2048), 1, 1, (16, 4)),
        ((5120, 2304), 1, 2, (7, 3)),
        ((7168, 2048), 1, 2, (8, 2)),
        ((5120, 2304), 1, 6, (2, 1)),
        ((7168, 2048), 1, 6, (4, 1)),
        ((5120, 2304), 2, 6, (2, 1)),
        ((7168, 2048), 2, 6, (2, 1)),
        ((5120, 2304), 4, 6, (1, 1)),
        ((7168, 2048), 4, 6, (1, 1)),
    ],
)
def test_k_of_both_products_is_cut_in_the_parts_chosen_for_an_h200(
    shape: tuple[int, int], tokens: int, top_k: int, parts: tuple[int, int]
) -> None:
    plan = launch.decode(tokens, *shape, 132, top_k=top_k)
    assert (plan.split_a, plan.split_b) == parts


@given(tokens=st.integers(1, 64), top_k=st.integers(1, 8))
def test_a_step_and_the_same_step_padded_to_a_power_of_two_are_launched_alike(
    tokens: int, top_k: int
) -> None:
    padded = next(size for size in (1, 2, 4, 8, 16, 32, 64) if size >= tokens)
    assert launch.alike(tokens) == padded
    for shape in ((5120, 2304), (7168, 2048)):
        mine, its = (launch.decode(n, *shape, 132, top_k=top_k) for n in (tokens, padded))
        assert mine == its


@given(
    tokens=st.integers(1, 64),
    hidden=st.integers(1, 64).map(lambda n: 128 * n),
    inner=st.integers(1, 112).map(lambda n: 128 * n),
    top_k=st.integers(1, 8),
)
def test_blocks_for_the_link_leave_no_round_of_an_experts_units_with_many_of_them_idle(
    tokens: int, hidden: int, inner: int, top_k: int
) -> None:
    plan = launch.decode(tokens, hidden, inner, 132, top_k=top_k)
    units = max(inner // 128 * plan.split_a, hidden // 128 * plan.split_b)
    rounds = -(-units // plan.host_blocks)
    assert 31 <= plan.host_blocks <= (90 if units < launch.MANY_SHORT_UNITS else 160)
    assert rounds * plan.host_blocks - units < rounds or plan.host_blocks % units == 0


@pytest.mark.parametrize(
    ("shape", "top_k", "blocks"),
    [((5120, 2304), 6, 40), ((7168, 2048), 6, 64), ((5120, 2304), 1, 126), ((7168, 2048), 1, 128)],
)
def test_an_h200_reads_over_the_link_with_the_blocks_that_were_measured(
    shape: tuple[int, int], top_k: int, blocks: int
) -> None:
    assert launch.decode(1, *shape, 132, top_k=top_k).host_blocks == blocks


@pytest.mark.parametrize("tokens", [0, 65])
def test_more_tokens_than_decode_takes_are_refused_with_the_number(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 64 tokens, not {tokens}"):
        launch.decode(tokens, 5120, 2304, 132, top_k=6)


def test_scratch_counts_every_buffer_to_the_byte() -> None:
    plan = dataclasses.replace(launch.decode(1, 5120, 2304, 132, top_k=1), split_a=4, split_b=1)
    need = launch.workspace(plan, picks=48, hidden=5120, intermediate=2304)
    assert need == launch.Workspace(
        rotated=48 * 5120 * 2 * 2,
        act=48 * 2304 * 2,
        partial_a=48 * 18 * 4 * 1024,
        partial_b=0,
        y=48 * 5120 * 4,
    )
    assert need.total == 983040 + 221184 + 3538944 + 983040


@settings(deadline=None)  # time says nothing here
@given(
    counts=st.lists(st.integers(0, 40), max_size=30),
    limit=st.integers(1, 50),
)
def test_groups_of_prefill_hold_every_pick_once_in_order(counts: list[int], limit: int) -> None:
    made = prefill_schedule.groups(counts, limit)
    picks = [piece.expert for group in made for piece in group for _ in range(piece.rows)]
    assert picks == [expert for expert, count in enumerate(counts) for _ in range(count)]
    for group in made:
        ends = [piece.at + piece.rows for piece in group]
        assert [piece.at for piece in group] == [0, *ends[:-1]] and ends[-1] <= limit
    assert all(sum(piece.rows for piece in group) == limit for group in made[:-1])


@settings(deadline=None)  # time says nothing here
@given(
    counts=st.lists(st.integers(0, 1500), min_size=1, max_size=30),
    host=st.sets(st.integers(0, 29)),
    most=st.integers(1, 8),
)
def test_runs_of_prefill_hold_every_row_once_and_release_every_batch_once(
    counts: list[int], host: set[int], most: int
) -> None:
    on_host = [e for e, count in enumerate(counts) if count and e in host]
    batch_of = {e: i for i, b in enumerate(staging.batches(on_host, most)) for e in b}
    work = prefill_schedule.groups(counts, 2048)
    ends = {batch_of[p.expert]: p for g in work for p in g if p.expert in batch_of}
    seen, released, waiting = [0] * len(counts), [], []
    for group in work:
        covered = [False] * sum(p.rows for p in group)
        for run in prefill_schedule.runs(group, batch_of, ends):
            assert len(run.pieces) == 1 if run.dense else run.pieces
            for piece in run.pieces:
                assert run.dense or piece.rows <= launch.PIECE_ROWS
                assert batch_of.get(piece.expert) == run.batch
                assert not any(covered[piece.at : piece.at + piece.rows])
                covered[piece.at : piece.at + piece.rows] = [True] * piece.rows
                seen[piece.expert] += piece.rows
            if run.batch is not None:
                assert run.batch not in released
                waiting.append(run.batch)
            if run.last:
                assert run.batch is not None
                released.append(run.batch)
        assert all(covered)
    assert seen == counts
    assert released == sorted(set(batch_of.values())) and waiting == sorted(waiting)


@settings(deadline=None)  # time says nothing here
@given(count=st.integers(0, 200), most=st.integers(1, 24))
def test_batches_of_copies_start_and_end_small_and_hold_every_expert_once(
    count: int, most: int
) -> None:
    made = staging.batches(range(count), most)
    assert [expert for batch in made for expert in batch] == list(range(count))
    assert all(len(batch) <= most for batch in made)
    assert not made or len(made[0]) == len(made[-1]) == 1


@settings(deadline=None)  # time says nothing here
@given(count=st.integers(0, 200), slots=st.integers(1, 40), most=st.integers(1, 24))
def test_every_copy_waits_for_the_reads_of_its_slot_and_is_enqueued_before_it_is_waited_for(
    count: int, slots: int, most: int
) -> None:
    made = staging.batches(range(count), min(most, slots))
    copied = 0
    for released in range(len(made) + 1):
        while copied < len(made) and staging.reader_of(made, copied, slots) < released:
            copied += 1
        if released < len(made):
            assert copied > released  # the next that is waited for
            last_free = made[released][0] - 1 + slots  # its own slots are still read
            assert made[copied - 1][-1] <= last_free
    assert copied == len(made)


@given(count=st.integers(1, 30), window=st.integers(1, 4))
def test_a_groups_scratch_is_reused_only_after_its_sum_and_sums_go_up(
    count: int, window: int
) -> None:
    held: dict[int, int] = {}
    added = []
    for index, on_host in prefill_schedule.steps(count, min(window, count)):
        if on_host:
            assert held.pop(index % min(window, count)) == index
            added.append(index)
        else:
            assert index % min(window, count) not in held
            held[index % min(window, count)] = index
    assert added == list(range(count)) and not held


@given(
    rows=st.integers(1, 32),
    k=st.integers(1, 64).map(lambda n: 128 * n),
    blocks=st.integers(1, 2000),
    count=st.integers(1, 200),
    architecture=st.sampled_from(["sm_90", "sm_120", "sm_86"]),
)
def test_matrices_are_cut_as_far_as_multiprocessors_can_work_at_once(
    rows: int, k: int, blocks: int, count: int, architecture: str
) -> None:
    plan = launch.linear(rows, k, blocks, count, architecture)
    assert rows <= 8 * plan.groups
    assert plan.split <= 2 or (plan.split * blocks <= 3 * count and k // plan.split >= 256)


def test_attention_of_the_reference_width_fills_an_h200() -> None:
    sizes = (6144, 1024, 32768, 131072)
    assert [launch.linear(1, 5120, n // 128, 132).split for n in sizes] == [8, 16, 2, 1]
    assert (
        launch.linear(9, 5120, 48, 132).split == 5
        and launch.linear(9, 5120, 48, 132, "sm_120").split == 2
    )
    with pytest.raises(ValueError, match="1 to 32 rows are multiplied in place, not 33"):
        launch.linear(33, 5120, 48, 132)
