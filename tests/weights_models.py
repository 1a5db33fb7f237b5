"""A small real model with one shard of three chunks, and how tests publish and fetch it."""

import hashlib
import random
from pathlib import Path

from hostile_server import HostileServer
from tiny_checkpoint import qwen

from appliance.weights.fetch import Transfer
from appliance.weights.manifest import File, Manifest, chunk_count
from appliance.weights.marks import write_mark
from appliance.weights.names import MANIFEST
from appliance.weights.network import Network
from appliance.weights.pull import Pulled, pull
from appliance.weights.release import link_target
from appliance.weights.source import open_source
from appliance.weights.store import Store

BIG = "model-00001-of-00002.safetensors"
EMBEDDING_ROWS = 70_000  # x 256 x 2 bytes: 34 MiB, three chunks


def write_model(
    folder: Path, seed: int | None, rows: int = EMBEDDING_ROWS, *, shards: int = 2, extra: int = 0
) -> Path:
    """A model that parses, its bytes random: other seed, other bytes; without a seed sparse.

    Every 2,048 rows are 1 MiB; `extra` tensors of as many rows are added, a shard each.
    """
    model = qwen()
    model.tensors["model.embed_tokens.weight"] = ("BF16", (rows, 256))
    for number in range(extra):
        model.tensors[f"visual.{number}.weight"] = ("BF16", (rows, 256))
    model.write(folder, shards=shards)
    (folder / "docs").mkdir()
    (folder / "docs" / "note.txt").write_text(f"seed {seed}\n")
    (folder / "empty").touch()
    for shard in folder.glob("*.safetensors") if seed is not None else ():
        with shard.open("r+b") as stream:
            header = 8 + int.from_bytes(stream.read(8), "little")
            stream.seek(header)
            draw, left = random.Random(seed), shard.stat().st_size - header
            while left:
                left -= stream.write(draw.randbytes(min(left, 16 << 20)))
    return folder


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


def add_sparse_release(store: Store, shards: int, shard_bytes: int) -> str:
    """A release of sparse blobs that count as proved, under made-up names; gives its id."""
    hashes = [f"{number:064x}" for number in range(1, shards + 1)]
    chunks = ("0" * 64,) * chunk_count(shard_bytes)
    files = tuple(
        File(path=f"s{sha}", size_bytes=shard_bytes, sha256=sha, chunks=chunks) for sha in hashes
    )
    made = Manifest(model="big", revision=None, licence=None, source=None, files=files)
    folder = store.release_folder(made.release_id)
    folder.mkdir()
    (folder / MANIFEST).write_bytes(made.to_json())
    for file in files:
        blob = store.blob(file.sha256)
        blob.parent.mkdir(exist_ok=True)
        with blob.open("wb") as stream:
            stream.truncate(file.size_bytes)
        (folder / file.path).symlink_to(link_target(file))
        write_mark(store, file.sha256, chunks)
    return made.release_id
