"""size: a model on machines nobody has, and machines side by side."""

import pytest


@pytest.fixture
def sized(appliance, made_model):
    def command(*words: object):
        return appliance("size", made_model, *words)

    return command


MACHINE = ("--gpu", "rtx-pro-6000", "--host-ram", "256GiB", "--users", 4, "--context", "4K")


def test_the_decision_path_comes_in_its_order_and_fits_the_screen(sized):
    said = sized(*MACHINE, "--count", 2)
    assert said.code == 0, said.err
    starts = [line.split()[0] for line in said.out.splitlines() if line[0] != " "]
    assert starts[:4] == ["2", "1.", "2.", "3."] and "answer" in starts
    assert "4 users at once, 4,096 tokens" in " ".join(said.out.split())
    assert max(map(len, said.out.splitlines())) <= 100


def test_compared_machines_are_a_row_each_and_told_apart(sized):
    said = sized(*MACHINE, "--count", 1, "--count", 2, "--context", "2K", "--compare")
    rows = said.out.splitlines()
    assert said.code == 0 and len(rows) == 5
    assert [" ".join(row.split()[:2]) for row in rows[1:]] == ["1 x", "1 x", "2 x", "2 x"]
    assert [row for row in rows[1:] if "2K tokens" in row] == [rows[2], rows[4]]


def test_several_machines_ask_for_compare_and_compare_for_several(sized):
    assert "--compare puts them" in sized(*MACHINE, "--count", 1, "--count", 2).err
    said = sized(*MACHINE, "--count", 1, "--compare")
    assert said.code == 2 and "give an option twice" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--count", 0, "--gpu", "h200", "--host-ram", "1TiB"), "count is 0"),
        (("--count", 1, "--gpu", "h2000", "--host-ram", "1TiB"), "known: rtx-pro-6000"),
        (("--count", 1, "--gpu", "h200", "--host-ram", "much"), "write it like 256GiB"),
        (("--count", 1, "--gpu", "h200", "--host-ram", "-1GiB"), "write it like 256GiB"),
        (("--count", 1, "--gpu", "h200", "--host-ram", "99TiB"), "do not go into"),
    ],
)
def test_an_impossible_machine_is_one_sentence_with_the_way_out(sized, words, message):
    said = sized(*words)
    assert said.code == 2 and said.out == "" and message in said.err


def test_a_model_that_is_no_folder_names_the_known_ones(appliance):
    said = appliance("size", "nope", *MACHINE, "--count", 2)
    assert said.code == 2 and "glm-5.3-flash" in said.err


def test_a_known_model_needs_no_folder(appliance):
    said = appliance("size", "glm-5.3-flash", *MACHINE, "--count", 4)
    assert said.code == 0 and "8 of 288 experts" in said.out
