"""The model, a store, and servers of its files."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_server import HostileServer
from weights_models import fetch, publish, write_model

from appliance.weights import guard
from appliance.weights.manifest import Manifest
from appliance.weights.names import MANIFEST
from appliance.weights.store import Store, make_store


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", seed=1)


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Store, Manifest]:
    """A store that holds the model, for tests that only read it."""
    store = make_store(tmp_path_factory.mktemp("filled") / "store")
    return store, fetch(store, str(model)).manifest


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of this test, in memory where there is room: syncing a busy disk takes seconds."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or guard.free_bytes(memory) < 1 << 30:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture
def store(folder: Path) -> Store:
    return make_store(folder / "store")


@pytest.fixture
def server() -> Iterator[HostileServer]:
    server = HostileServer()
    yield server
    server.close()


@pytest.fixture
def mirror(server: HostileServer, model: Path, filled: tuple[Store, Manifest]) -> HostileServer:
    """The model with our manifest, so that every chunk can be held against its hash."""
    publish(server, model)
    server.files[f"/m/{MANIFEST}"] = filled[1].to_json()
    return server
