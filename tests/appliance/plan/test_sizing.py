"""appliance size: yes or no, what binds, and what a change would buy."""

import math
import re
import time
from dataclasses import replace
from fractions import Fraction

import pytest
from machines import machine
from plan_builders import GIB, checkpoint, deepseek_v41_flash, host

from appliance.errors import UnsupportedError, UsageError
from appliance.plan.sizing import Ask, Load, answer, bytes_from, people, tokens_from, with_bits
from appliance.plan.sizing_report import compare_lines, lines_here, size_lines

FLASH = deepseek_v41_flash()
REFERENCE = Ask("rtx-pro-6000", 2, 256 * GIB, users=4, context_tokens=262_144)


def test_four_streams_carry_the_nineteen_people_of_the_seat_model() -> None:
    # FACTS section 1: 19 people, P(more than 4 active) 0.90 %; 20 people, 1.13 %.
    assert people(4) == 19


def test_the_path_goes_from_activation_to_memory_to_streams_to_an_answer() -> None:
    lines = size_lines(FLASH, REFERENCE)
    starts = [line.split(" ")[0] for line in lines[1:]]
    assert starts[:3] == ["1.", "2.", ""] and "3." in starts and "answer" in starts
    assert "6 of 384 experts a layer (1.6%)" in lines[1]
    assert any(line.startswith("assumes") for line in lines)
    assert any(line.startswith("option") and "2-bit package" in line for line in lines)


def test_too_little_host_memory_says_so_and_names_enough() -> None:
    short = Ask("rtx-pro-6000", 2, 128 * GIB, users=4, context_tokens=262_144)
    text = "\n".join(size_lines(FLASH, short))
    assert "answer        no: host memory binds first" in text
    assert "option        192 GiB of host memory: fits" in text
    assert answer(FLASH, short).plan is None
    assert answer(FLASH, Ask("rtx-pro-6000", 2, 192 * GIB, 4, 262_144)).plan is not None


def test_four_cards_need_whole_experts_and_the_answer_says_so() -> None:
    four = Ask("rtx-pro-6000", 4, 256 * GIB, users=4, context_tokens=65_536)
    text = "\n".join(size_lines(FLASH, four))
    assert "answer        no: the split over cards binds first" in text
    assert "option        whole experts on each card: fits" in text


def test_a_model_that_is_all_on_fast_cards_is_a_yes() -> None:
    found = answer(FLASH, Ask("h200", 2, 256 * GIB, users=4, context_tokens=65_536))
    assert found.yes and found.plan is not None
    assert found.plan.predictions[0].cold_share == 0


def test_fewer_bits_shrink_experts_and_nothing_else() -> None:
    two = with_bits(FLASH, 2)
    saved = FLASH.size_bytes - two.size_bytes
    # FACTS section 1: 190.48 GiB at K = 3, 127.2 at K = 2.
    assert sum(la.size_bytes for la in two.layers) / GIB == pytest.approx(127.2, abs=0.1)
    assert saved == sum(la.size_bytes for la in FLASH.layers) - sum(
        la.size_bytes for la in two.layers
    )


def test_options_stand_side_by_side() -> None:
    lines = compare_lines(FLASH, [REFERENCE, Ask("h200", 2, 256 * GIB, 4, 65_536)])
    assert len(lines) == 3
    assert " no " in lines[1] and "the link" in lines[1]
    assert " yes " in lines[2]


def test_a_model_that_no_machine_could_serve_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="the model has no routed experts"):
        size_lines(checkpoint((), quantisation="none"), REFERENCE)
    with pytest.raises(UsageError, match="the model was made for 1,048,576"):
        size_lines(FLASH, replace(REFERENCE, context_tokens=9 << 20))


def test_far_too_many_users_get_the_number_that_fits_and_soon() -> None:
    asked = replace(REFERENCE, users=100_000)
    start = time.process_time()
    text = "\n".join(size_lines(FLASH, asked))
    assert time.process_time() - start < 20
    said = re.search(r"option +(\d+) users at once: fits", text)
    assert said is not None and "card memory binds first" in text
    most = int(said[1])
    assert answer(FLASH, replace(asked, users=most)).plan is not None
    assert answer(FLASH, replace(asked, users=most + 1)).plan is None


@pytest.mark.parametrize("streams", [1, 4, 6, 300])
def test_people_are_the_most_of_whom_more_are_active_in_under_one_percent(streams: int) -> None:
    def more_active(count: int) -> Fraction:
        few = sum(math.comb(count, k) * 71**k * 929 ** (count - k) for k in range(streams + 1))
        return 1 - Fraction(few, 1000**count)

    count = people(streams)
    assert more_active(count) <= Fraction(1, 100) < more_active(count + 1)
    assert streams != 4 or count == 19, "the public seat model"


def test_sizes_and_tokens_are_read_as_people_write_them() -> None:
    assert bytes_from("256GiB") == 256 * GIB and bytes_from("96 gb") == 96 * 10**9
    assert bytes_from("1.5TiB") == 1536 * GIB and bytes_from("1024B") == 1024
    assert tokens_from("256K") == 262_144 and tokens_from("4096") == 4096
    for bad in ("", "GiB", "-1GiB", "1 parsec"):
        with pytest.raises(UsageError, match="is not a size"):
            bytes_from(bad)
    for bad in ("256 KB", "9" * 5000):
        with pytest.raises(UsageError, match="is not a number of tokens"):
            tokens_from(bad)
    with pytest.raises(UsageError, match="is not a size"):
        bytes_from("9" * 400 + "GiB")


def test_a_size_without_a_unit_is_refused_with_the_one_that_was_meant() -> None:
    for bare in ("64", " 64 ", "1024"):
        with pytest.raises(UsageError, match="is a number without a unit") as said:
            bytes_from(bare)
        assert said.value.fix == f"write it like {bare.strip()}GiB"


def test_a_host_with_hardly_any_memory_is_told_how_much_would_do() -> None:
    """Memory binds, so an amount that fits is among the options, however far from what there is."""
    bare = Ask("rtx-pro-6000", 2, 8 * GIB, users=4, context_tokens=65_536)
    text = "\n".join(size_lines(FLASH, bare))
    assert "answer        no: host memory binds first" in text and "add memory" in text
    said = re.search(r"option +(\d+) GiB of host memory: fits", text)
    assert said is not None and int(said[1]) == 256
    assert answer(FLASH, replace(bare, host_bytes=256 * GIB)).plan is not None
    assert answer(FLASH, replace(bare, host_bytes=128 * GIB)).plan is None


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"count": 0}, "count is 0"),
        ({"users": 0}, "users is 0"),
        ({"host_bytes": -1}, "--host-ram is -1"),
        ({"target": float("nan")}, "--target is nan"),
        ({"gpu": "voodoo"}, "no GPU is called 'voodoo'; known: rtx-pro-6000"),
        ({"host": "toaster"}, "no host is called 'toaster'"),
        ({"host": "desktop", "host_bytes": 512 * GIB}, "512 GiB of memory do not go into"),
    ],
)
def test_impossible_machines_are_refused(bad: dict[str, object], sentence: str) -> None:
    whole: dict[str, object] = {"gpu": "h200", "count": 1, "host_bytes": 64 * GIB, "users": 1}
    with pytest.raises(UsageError, match=sentence):
        Ask(**(whole | bad))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "answer_"),
    [
        ("two-rtx-pro-6000-healthy", "it fits, and is too slow: the link binds first"),
        ("h200-1gpu", "no: host memory binds first"),
    ],
)
def test_a_machine_that_is_there_gets_the_same_verdict_before_309_gib_are_fetched(
    name: str, answer_: str
) -> None:
    lines = lines_here(FLASH, machine(name), Load())
    assert lines[0].startswith("1. activation") and lines[1].startswith("2. memory")
    assert lines[-1] == f"answer        {answer_}"


def test_without_a_gpu_the_verdict_speaks_of_no_card() -> None:
    text = "\n".join(lines_here(checkpoint(), host(), Load()))
    assert "GiB of RAM as each rank's device" in text and "on each card" not in text
