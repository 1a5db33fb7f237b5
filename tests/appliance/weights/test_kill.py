"""kill -9, full disks, lost writes: a sample of what `make soak` does at every point."""

import errno
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import crash_points
import pytest
from crash_points import (
    Crasher,
    crasher,
    kill_at,
    kill_first_pull_at,
    kill_pulls,
    kill_repairs_at,
    kill_writers_at,
    refetch_limit,
    what_is_wrong,
)
from hostile_server import HostileServer
from weights_models import BIG, fetch, publish, same_bytes, sums_of, write_model

from appliance.weights.activate import activate
from appliance.weights.manifest import CHUNK_BYTES
from appliance.weights.names import MANIFEST
from appliance.weights.store import Store, make_store, open_store

SEED = 20261129


@pytest.fixture(scope="module")
def crash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crasher]:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the library that kills at a chosen call")
    with crasher(tmp_path_factory.mktemp("crash")) as started:
        yield started


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two revisions of a small model that share one shard."""
    first = write_model(tmp_path_factory.mktemp("small") / "tiny", seed=1, rows=64)
    second = Path(shutil.copytree(first, first.parent / "next" / "tiny"))
    (second / "docs" / "note.txt").write_text("second\n")
    return first, second


@pytest.fixture
def two_releases(folder: Path, small: tuple[Path, Path]) -> Store:
    store = make_store(folder / "prepared")
    releases = [fetch(store, str(model)).release for model in small]
    activate(store, releases[0])
    return store


def test_pull_survives_kills_anywhere_and_fetches_at_most_a_chunk_a_connection_again(
    crash: Crasher, folder: Path, mirror: HostileServer
):
    completed, kills = kill_pulls(crash, folder, f"{mirror.url}/m", kills=12, seed=SEED)
    asked = sum(r.stop - r.start for r in mirror.requests if r.start is not None)
    size = sum(len(body) for path, body in mirror.files.items() if not path.endswith(MANIFEST))
    assert asked <= refetch_limit(size * (completed + 1), kills)


def test_pull_survives_a_kill_at_every_call_that_makes_the_release(
    crash: Crasher, folder: Path, small: tuple[Path, Path]
):
    calls = crash.run("pull", folder / "count", str(small[0])).calls
    assert calls and calls > 60
    points = [*range(calls - 24, calls + 1), *range(1, calls - 24, 12)]
    kill_first_pull_at(crash, folder / "work", str(small[0]), points, crash_points.KILL_AFTER)


def test_a_kill_in_mid_file_costs_at_most_a_chunk_a_connection(
    crash: Crasher, folder: Path, tmp_path: Path, server: HostileServer
):
    model = write_model(tmp_path / "model", seed=1, rows=250_000)  # 122 MiB, 8 chunks
    publish(server, model)
    server.files["/m/SHA256SUMS"] = sums_of(model)
    whole = crash.run("pull", folder / "count", f"{server.url}/m").calls
    shutil.rmtree(folder / "count")
    for n in (whole // 2, whole * 2 // 3):
        server.requests.clear()
        store = folder / f"store-{n}"
        assert crash.run("pull", store, f"{server.url}/m", n=n).signal == 9
        assert what_is_wrong(store) == []
        assert crash.run("pull", store, f"{server.url}/m").code == 0
        asked = sum(r.stop - r.start for r in server.requests if r.start is not None)
        size = open_store(store).manifest(open_store(store).releases()[0]).size_bytes
        looks = 4 << 20  # sizes and headers, twice
        assert 0 < asked - size <= crash_points.CONNECTIONS * CHUNK_BYTES + looks
        shutil.rmtree(store)


def test_activate_survives_a_kill_at_every_call(crash: Crasher, folder: Path, two_releases: Store):
    other = next(r for r in two_releases.releases() if r != two_releases.current())
    shutil.copytree(two_releases.folder, folder / "count", symlinks=True)
    crash_points.copy(two_releases.folder, folder / "count")
    calls = crash.run("activate", folder / "count", other).calls
    assert calls and calls > 5
    points = list(range(1, calls + 1))
    kill_at(crash, two_releases.folder, folder / "work", "activate", other, points)


@pytest.mark.parametrize("operation", ["gc", "verify"])
def test_gc_and_verify_survive_kills(
    operation: str, crash: Crasher, folder: Path, two_releases: Store
):
    crash_points.copy(two_releases.folder, folder / "count")
    calls = crash.run(operation, folder / "count").calls
    assert calls
    points = sorted(random.Random(SEED).sample(range(1, calls + 1), min(calls, 6)))
    kill_at(crash, two_releases.folder, folder / "work", operation, "", points)


@pytest.mark.parametrize("operation", ["bundle", "repack"])
def test_bundle_and_repack_survive_kills(
    operation: str, crash: Crasher, folder: Path, two_releases: Store
):
    crash_points.copy(two_releases.folder, folder / "count")
    calls = crash.run(operation, folder / "count").calls
    assert calls and calls > 8
    points = sorted(random.Random(SEED).sample(range(1, calls + 1), 5))
    kill_writers_at(crash, two_releases.folder, folder / "work", operation, points)


def test_repair_survives_a_kill_at_every_call(
    crash: Crasher, folder: Path, two_releases: Store, small: tuple[Path, Path]
):
    crash_points.copy(two_releases.folder, folder / "count")
    crash_points.damage(open_store(folder / "count"))
    calls = crash.run("repair", folder / "count", str(small[0])).calls
    assert calls and calls > 5
    points = sorted(random.Random(SEED).sample(range(1, calls + 1), min(calls, 8)))
    kill_repairs_at(crash, two_releases.folder, folder / "work", str(small[0]), points)


def test_a_disk_full_at_any_write_is_a_sentence_and_the_next_run_goes_on(
    crash: Crasher, folder: Path, small: tuple[Path, Path]
):
    calls = crash.run("pull", folder / "count", str(small[0])).calls
    assert calls and calls > 40
    points = sorted(random.Random(SEED).sample(range(1, calls + 1), 15))
    for n in points:
        store = folder / f"full-{n}"
        end = crash.run("pull", store, str(small[0]), n=n, failure=errno.ENOSPC)
        assert end.code in (0, 1), end  # 0: a call more than this run makes
        assert end.code == 0 or "No space left on device" in end.text
        assert what_is_wrong(store) == []
        assert crash.run("pull", store, str(small[0])).code == 0
        release = open_store(store).releases()[0]
        assert same_bytes(open_store(store).release_folder(release), small[0])


def test_a_chunk_that_the_disk_lost_after_it_was_journalled_is_the_only_one_fetched_again(
    store: Store, mirror: HostileServer, model: Path
):
    # As after power loss: the journal says that the chunk is there, the disk has zeros.
    missing = len((model / BIG).read_bytes()) // CHUNK_BYTES * CHUNK_BYTES
    mirror.fails(
        lambda handler, request, body: handler.answer(404, b""),
        when=lambda r: r.path.endswith(BIG) and r.start == missing,
        times=99,
    )
    with pytest.raises(Exception, match="404"):
        fetch(store, f"{mirror.url}/m", connections=1)
    mirror.faults.clear()
    part = max(store.staging.glob("*.part"), key=lambda path: path.stat().st_blocks)
    with part.open("r+b") as stream:
        stream.seek(CHUNK_BYTES)
        stream.write(bytes(CHUNK_BYTES))
    mirror.requests.clear()
    pulled = fetch(store, f"{mirror.url}/m", connections=1)
    assert same_bytes(store.release_folder(pulled.release), model)
    starts = [r.start for r in mirror.requests if r.path.endswith(BIG)]
    assert starts == [0, missing, CHUNK_BYTES]  # 0: the header, looked at first
