"""Sessions by seed, text by key, traces by format."""

import itertools
import json
import statistics
from pathlib import Path

import pytest

from appliance.bench.text import text
from appliance.bench.traces import read_trace
from appliance.bench.turns import Piece, Session, Shape, Spread, read_shape, sessions, unthinking
from appliance.errors import UsageError


def some(shape: Shape, seed: int, count: int = 40) -> list[Session]:
    return list(itertools.islice(sessions(shape, seed), count))


def test_the_same_seed_gives_the_same_sessions_and_another_seed_others() -> None:
    assert some(Shape(), 1) == some(Shape(), 1)
    assert some(Shape(), 1) != some(Shape(), 2)


def test_lengths_follow_the_stated_median_and_95th_percentile() -> None:
    shape = Shape(turns=Spread(median=20, p95=20.001), most_context_tokens=10**9)
    inputs = sorted(t.pieces[-1].tokens for s in some(shape, 3, 200) for t in s.turns)
    assert statistics.median(inputs) == pytest.approx(400, rel=0.08)
    assert inputs[int(0.95 * len(inputs))] == pytest.approx(4000, rel=0.15)


def test_all_sessions_share_the_system_prompt_and_nothing_else() -> None:
    keys = [{p.key for t in s.turns for p in t.pieces} for s in some(Shape(), 1)]
    for a, b in itertools.combinations(keys, 2):
        assert a & b == {"system"}


def test_no_session_outgrows_the_context() -> None:
    shape = Shape(most_context_tokens=9000)
    for session in some(shape, 4):
        used = sum(t.output_tokens + sum(p.tokens for p in t.pieces) for t in session.turns)
        assert used <= 9000


def test_a_shape_that_cannot_hold_one_turn_is_refused() -> None:
    with pytest.raises(UsageError, match="100 tokens of context"):
        some(Shape(most_context_tokens=100), 1)


def test_streams_that_never_idle_have_the_same_turns_without_the_thinking() -> None:
    idle, busy = some(Shape(), 5), list(map(unthinking, some(Shape(), 5)))
    assert any(t.think_seconds > 0 for s in idle for t in s.turns)
    assert all(t.think_seconds == 0 for s in busy for t in s.turns)
    assert [t.pieces for s in idle for t in s.turns] == [t.pieces for s in busy for t in s.turns]


def test_a_shape_file_with_an_unknown_key_names_it(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"sytem_tokens": 10}')
    with pytest.raises(UsageError, match="sytem_tokens"):
        read_shape(tmp_path / "s.json")


def test_equal_keys_are_equal_text_and_others_differ_from_the_first_line() -> None:
    assert text("a", 500) == text("a", 500)
    assert text("a", 500)[:20] != text("b", 500)[:20]
    assert len(text("a", 500)) == 1750
    assert len(text("a", 3_000_000)) == 10_500_000


MOONCAKE = [  # the layout of the public traces, with numbers of our own
    {"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 3052, "input_length": 1200, "output_length": 26, "hash_ids": [46, 47, 99]},
]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncake_blocks_that_are_shared_become_equal_pieces(tmp_path: Path) -> None:
    one, two = read_trace(write(tmp_path / "m.jsonl", MOONCAKE))
    assert one.turns[0].pieces == (
        Piece("block 46", 512), Piece("block 47", 512), Piece("block 48", 76),
    )  # fmt: skip
    assert two.turns[0].pieces[:2] == one.turns[0].pieces[:2]
    assert (one.turns[0].output_tokens, two.turns[0].output_tokens) == (52, 26)


def aiperf_row(
    index: int, inputs: int, outputs: int, start: float, end: float
) -> dict[str, object]:
    return {
        "metadata": {
            "conversation_id": "c1",
            "turn_index": index,
            "request_start_ns": int(start * 1e9),
            "request_end_ns": int(end * 1e9),
        },
        "metrics": {
            "input_sequence_length": {"value": inputs, "unit": "tokens"},
            "output_sequence_length": {"value": outputs, "unit": "tokens"},
        },
        "error": None,
    }


def test_a_conversation_of_aiperf_grows_turn_by_turn_with_its_pauses(tmp_path: Path) -> None:
    rows = [aiperf_row(1, 700, 50, 14.0, 15.0), aiperf_row(0, 500, 100, 10.0, 12.5)]
    (session,) = read_trace(write(tmp_path / "a.jsonl", rows))
    assert [t.pieces[0].tokens for t in session.turns] == [500, 100]
    assert [t.output_tokens for t in session.turns] == [100, 50]
    assert [t.think_seconds for t in session.turns] == [0.0, 1.5]


def test_a_history_that_was_cut_begins_another_session(tmp_path: Path) -> None:
    rows = [aiperf_row(0, 500, 9, 1, 2), aiperf_row(1, 400, 9, 3, 4), aiperf_row(2, 450, 9, 5, 6)]
    first, second = read_trace(write(tmp_path / "a.jsonl", rows))
    assert [t.pieces[0].tokens for t in first.turns] == [500]
    assert [t.pieces[0].tokens for t in second.turns] == [400, 41]
    assert not {p.key for t in first.turns for p in t.pieces} & {
        p.key for t in second.turns for p in t.pieces
    }


def request(t: float, length: int, out: int, ids: list[int], **more: object) -> dict[str, object]:
    made: dict[str, object] = {"t": t, "type": "s", "model": "m", "in": length, "out": out}
    return made | {"hash_ids": ids, "api_time": 2.0} | more


def test_a_corpus_of_agentx_gives_growing_sessions_and_those_of_subagents(tmp_path: Path) -> None:
    inner = [request(0.0, 70, 10, [9]), request(3.0, 120, 0, [9, 10], think_time=0.5)]
    agent = {"t": 4.0, "type": "subagent", "agent_id": "agent_001", "requests": inner}
    outer = [
        request(0.0, 200, 50, [1, 2, 3, 4]),
        request(5.0, 300, 20, [1, 2, 3, 5, 6]),  # the fourth block was not full
        agent,
        request(9.0, 330, 20, [1, 7, 8, 9, 10, 11]),  # compacted: only the first block is kept
    ]
    trace = {"id": "t1", "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    sub, first, second = read_trace(write(tmp_path / "x.jsonl", [trace | {"requests": outer}]))
    assert [t.pieces[0].tokens for t in first.turns] == [200, 50]
    assert [t.think_seconds for t in first.turns] == [0.0, 3.0]
    assert [t.pieces[0].tokens for t in second.turns] == [330]
    assert "agent_001" in sub.name and [t.output_tokens for t in sub.turns] == [10, 1]
    assert [t.think_seconds for t in sub.turns] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": 1}], "no known format"),
        ([{**MOONCAKE[0], "input_length": 9000}], "3 blocks of 512"),
        ([MOONCAKE[0], {**MOONCAKE[0], "output_length": None}], "line 2: output_length is None"),
        ([{"id": "t", "block_size": 64, "requests": [{"type": "n", "in": 0}]}], "in is 0"),
        ([{"id": "t", "block_size": 64, "requests": []}], "no requests"),
        ([], "no requests"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused_with_its_line(
    tmp_path: Path, rows: list[dict[str, object]], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        read_trace(write(tmp_path / "t.jsonl", rows))
