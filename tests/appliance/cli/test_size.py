"""size: a model on machines nobody has, and machines side by side."""

import json
import re

import pytest

from appliance.checkpoint.exl3 import read_checkpoint


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
        (("--count", 1, "--gpu", "h200", "--host-ram", "64"), "write it like 64GiB"),
        (("--count", 1, "--gpu", "h200", "--host-ram", "99TiB"), "do not go into"),
    ],
)
def test_an_impossible_machine_is_one_sentence_with_the_way_out(sized, words, message):
    said = sized(*words)
    assert said.code == 2 and said.out == "" and message in said.err


def test_a_model_that_is_no_folder_names_the_known_ones(appliance):
    said = appliance("size", "nope", *MACHINE, "--count", 2)
    assert said.code == 2 and "glm-5.3-flash" in said.err


def test_a_listing_of_headers_and_a_manifest_answer_as_the_folder_does(
    appliance, made_model, tmp_path
):
    listing = tmp_path / "tiny.json"
    whole = appliance("size", made_model, *MACHINE, "--count", 2, "--listing", listing)
    assert whole.code == 0, whole.err
    manifest = tmp_path / "manifest.json"
    manifest.write_text(
        json.dumps({"files": [], "checkpoint": {"outline": json.loads(listing.read_text())}})
    )
    for given in (listing, manifest):
        assert appliance("size", given, *MACHINE, "--count", 2).out == whole.out
    headers = tmp_path / "headers.json"
    tensors = {t.name: {"dtype": t.dtype, "shape": t.shape}
               for t in read_checkpoint(made_model).tensors.values()}  # fmt: skip
    config = json.loads((made_model / "config.json").read_text())
    headers.write_text(json.dumps({"config": config, "tensors": tensors}))
    assert appliance("size", headers, *MACHINE, "--count", 2).out == whole.out


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"files": [], "checkpoint": {"family": "glm"}}, "no outline of its headers"),
        ({"config": {}, "tensors": {}}, "names no tensor"),
        ({"config": {}, "tensors": {"a": {"dtype": "I17", "shape": [1]}}}, "a needs a dtype"),
        ({"config": {}, "tensors": {"a": {"dtype": "I16", "shape": [-1]}}}, "a needs a dtype"),
        ({"model": "x"}, "neither a manifest nor a listing"),
        ({"dense": [], "layers": 3}, "family: Field required"),
        ("{", "is not JSON"),
    ],
)
def test_a_file_that_is_no_listing_is_one_sentence(appliance, tmp_path, held, message):
    file = tmp_path / "file.json"
    file.write_text(held if isinstance(held, str) else json.dumps(held))
    said = appliance("size", file, *MACHINE, "--count", 2)
    assert said.code in (1, 2) and said.out == "" and message in said.err


def test_an_fp8_cache_leaves_more_of_a_card_to_experts(appliance, made_model):
    long = ("--gpu", "rtx-pro-6000", "--host-ram", "256GiB", "--count", 1, "--context", "32K")
    auto = appliance("size", "glm-5.3-flash", *long)
    fp8 = appliance("size", "glm-5.3-flash", *long, "--kv-dtype", "fp8")
    waiting = [float(re.search(r"([\d.]+)% of the experts wait", s.out)[1]) for s in (auto, fp8)]
    assert waiting[1] < waiting[0]


def test_a_known_model_needs_no_folder(appliance):
    said = appliance("size", "glm-5.3-flash", *MACHINE, "--count", 4)
    assert said.code == 0 and "8 of 288 experts" in said.out
