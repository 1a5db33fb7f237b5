"""Helm and the schemas, in .venv/chart-tools."""

from pathlib import Path

import pytest
from charts import REPOSITORY, Helm, fetch


@pytest.fixture(scope="session")
def tools() -> Path:
    folder = REPOSITORY / ".venv" / "chart-tools"
    if not (folder / "helm" / "helm").exists():
        fetch(folder)
    return folder


@pytest.fixture(scope="session")
def helm(tools) -> Helm:
    return Helm(tools / "helm" / "helm")
