"""A small real model with one shard of three chunks, a store, and servers of its files."""

import hashlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_server import HostileServer
from tiny_checkpoint import qwen

from appliance.weights import durable
from appliance.weights.fetch import Transfer
from appliance.weights.manifest import Manifest
from appliance.weights.names import MANIFEST
from appliance.weights.network import Network
from appliance.weights.pull import Pulled, pull
from appliance.weights.source import open_source
from appliance.weights.store import Store, make_store

BIG = "model-00001-of-00002.safetensors"
EMBEDDING_ROWS = 70_000  # x 256 x 2 bytes: 34 MiB, three chunks


def write_model(folder: Path, seed: int, rows: int = EMBEDDING_ROWS) -> Path:
    """A model that parses, its bytes random: other seed, other bytes."""
    model = qwen()
    model.tensors["model.embed_tokens.weight"] = ("BF16", (rows, 256))
    model.write(folder, shards=2)
    (folder / "docs").mkdir()
    (folder / "docs" / "note.txt").write_text(f"seed {seed}\n")
    (folder / "empty").touch()
    for shard in folder.glob("*.safetensors"):
        with shard.open("r+b") as stream:
            header = 8 + int.from_bytes(stream.read(8), "little")
            stream.seek(header)
            stream.write(random.Random(seed).randbytes(shard.stat().st_size - header))
    return folder


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
    if not memory.is_dir() or durable.free_bytes(memory) < 1 << 30:
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


def publish(server: HostileServer, folder: Path, at: str = "/m") -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            server.files[f"{at}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()


def sums_of(folder: Path) -> bytes:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"
        for path in paths
    ).encode()


def fetch(store: Store, source: str, network: Network = Network(), **transfer: object) -> Pulled:  # noqa: B008
    chosen = Transfer(**{"first_pause_seconds": 0.01, **transfer})
    return pull(store, open_source(source, network), chosen, lambda moment: None)


def same_bytes(release: Path, model: Path) -> bool:
    """Every file of the model is in the release with the same bytes, and nothing else is."""

    def files(folder: Path) -> dict[str, bytes]:
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and path.name != MANIFEST
        }

    return files(release) == files(model)
