"""Synthetic models and prompts, made once per session."""

from collections.abc import Callable
from typing import Any

import pytest
from e2e.lab import Lab

from appliance.checkpoint.synth import SynthSpec, synthesize


@pytest.fixture(scope="session")
def prompts() -> dict[str, Any]:
    """20 prompts of 3 to 41 tokens, 64 tokens asked of each."""
    rows = [[4 + (7 * p + 13 * i) % 900 for i in range(3 + 2 * p)] for p in range(20)]
    return {"prompts": rows, "tokens": 64}


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Lab]:
    made: dict[str, Lab] = {}

    def make(family: str) -> Lab:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            synthesize(folder / "model", SynthSpec(family=family))
            made[family] = Lab(folder, folder / "model")
        return made[family]

    return make
