"""Impossible models are refused with the numbers and a way out."""

from typing import Any

import pytest

from appliance.checkpoint.synth import SynthSpec
from appliance.errors import UsageError


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"family": "gpt9"}, "family 'gpt9' is unknown"),
        ({"codebook": "mcl"}, "codebook 'mcl' is unknown"),
        ({"hidden_size": 200}, "hidden_size is 200, and EXL3 needs a multiple of 128"),
        ({"intermediate_size": 0}, "intermediate_size is 0, and EXL3 needs"),
        ({"top_k": 17}, "top_k is 17, but a layer has only 16 experts"),
        ({"experts": 0}, "experts is 0 and must be at least 1"),
        ({"dense_layers": 4}, "dense_layers is 4 of 4 layers"),
        ({"heads": 4, "kv_heads": 3}, "4 heads cannot share 3 kv_heads"),
        ({"bits": (3, 2.5, 3)}, "up bits is 2.5, but codebook mcg has whole bits only"),
        ({"bits": (3, 3, 9)}, "down bits is 9"),
        ({"bits": (0.5, 3, 3), "codebook": "mul1"}, "gate bits is 0.5"),
        ({"vocab_size": 300}, "vocab_size is 300, too few"),
        ({"vocab_size": 1000}, "vocab_size is 1000, and an EXL3 head needs a multiple of 256"),
        ({"shards": 0}, "shards is 0"),
    ],
)
def test_an_impossible_model_is_refused_with_its_numbers(
    fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        SynthSpec(**fields)
    assert sentence in caught.value.message


def test_the_way_out_of_a_wrong_size_is_the_nearest_right_one() -> None:
    with pytest.raises(UsageError) as caught:
        SynthSpec(hidden_size=200)
    assert caught.value.fix == "hidden_size 256"


def test_half_bits_are_allowed_with_mul1() -> None:
    assert SynthSpec(bits=(1.5, 2.5, 3.5), codebook="mul1").bits == (1.5, 2.5, 3.5)


def test_an_unquantised_head_takes_any_vocabulary() -> None:
    assert SynthSpec(vocab_size=1000, quantise_head=False).vocab_size == 1000
