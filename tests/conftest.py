"""Fixtures every test may use."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real inputs beside the checkout. They are others' data: read, never copied."""
    folder = Path(os.environ.get("MOE_APPLIANCE_SHARED", REPOSITORY.parent / "shared"))
    if folder.is_dir():
        return folder
    if os.environ.get("CI"):
        pytest.fail(f"{folder} is missing: CI must have the real inputs")
    pytest.skip(f"{folder} is absent: these tests need the folder of real inputs")
