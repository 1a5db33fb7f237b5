"""The store: names, activation, history, giving space back, verification and repair."""

import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights_models import BIG, add_sparse_release, fetch, publish, same_bytes, write_model

from appliance.errors import UsageError, WeightsError
from appliance.weights import guard
from appliance.weights.activate import activate, previous, read_history, rollback
from appliance.weights.fetch import Transfer
from appliance.weights.manifest import (
    CHUNK_BYTES,
    load_manifest,
)
from appliance.weights.marks import clean_mark, prove
from appliance.weights.names import MANIFEST, check_paths
from appliance.weights.network import Network
from appliance.weights.pull import check_room
from appliance.weights.release import check_release
from appliance.weights.repair import repair
from appliance.weights.source import Wanted, open_source
from appliance.weights.store import make_store, open_store
from appliance.weights.sweep import gc, rm, usage
from appliance.weights.verify import Reading, Verdict, verify

HOSTILE_NAMES = [
    "../evil", "a/../../evil", "/etc/passwd", "C:/x", "a//b", "./a", "a/.", "", "a\\b", "a\nb",
    "a\x00b", "x" * 256, "a/" * 600 + "b", "con", "NUL.txt", "name ", "name.", MANIFEST, "\ud800",
]  # fmt: skip


@pytest.fixture
def three(store, folder):
    """Three releases of small models, all in the store."""
    return [
        fetch(store, str(write_model(folder / f"m{seed}", seed, rows=8))).release
        for seed in (1, 2, 3)
    ]


def read_all(store, release, **how):
    return verify(store, [release], Reading(**how), lambda done, total: None)


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=ascii)
def test_a_name_that_leaves_its_folder_or_means_something_else_elsewhere_is_refused(name):
    with pytest.raises(WeightsError, match=r"refused|file system"):
        check_paths([name])


@pytest.mark.parametrize(
    "names", [["a", "A"], ["straße", "STRASSE"], ["é", "e\u0301"], ["d/x", "D/X"], ["a", "a/b"]]
)
def test_names_that_clash_on_some_file_system_are_refused(names):
    with pytest.raises(WeightsError):
        check_paths(names)


@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=4))
def test_accepted_names_stay_inside_and_stay_apart(names):
    try:
        check_paths(names)
    except WeightsError:
        return
    folder = Path("/store/release")
    places = {os.path.normpath(folder / name) for name in names}
    assert all(place.startswith("/store/release/") for place in places)
    assert len(places) == len(names)


def manifest(**changes) -> dict:
    file = {"path": "a", "size_bytes": 1, "sha256": "0" * 64, "chunks": ["0" * 64]}
    made = {"schema_version": 1, "model": "m", "revision": None, "licence": None, "source": None}
    return {**made, "files": [{**file, **changes}]}


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (manifest(path="../x"), "stay in its folder"),
        (manifest(chunks=[]), "has 0 chunks"),
        (manifest(sha256="xyz"), "sha256"),
        ({**manifest(), "colour": "red"}, "colour"),
        ({**manifest(), "files": []}, "without files"),
        ({**manifest(), "schema_version": 2}, "has schema 2"),
        ([], "no valid manifest"),
    ],
)
def test_a_manifest_that_is_not_understood_is_refused(broken, says):
    with pytest.raises(WeightsError, match=says):
        load_manifest(json.dumps(broken).encode(), "m.json")


def test_a_manifest_with_a_key_twice_is_refused():
    text = json.dumps(manifest()).replace('"model"', '"model": "x", "model"', 1)
    with pytest.raises(WeightsError, match="twice"):
        load_manifest(text.encode(), "m.json")


def test_the_same_files_have_the_same_id_wherever_they_come_from(store, model, filled):
    assert fetch(store, str(model)).release == filled[1].release_id
    assert load_manifest(filled[1].to_json(), "m").release_id == filled[1].release_id


def test_activation_and_rollback_keep_a_history(store, three):
    one, two, _ = three
    assert store.current() is None
    activate(store, one)
    activate(store, two)
    assert (store.current(), previous(store)) == (two, one)
    assert rollback(store).new == one
    assert (store.current(), previous(store)) == (one, two)
    pairs = [(switch.old, switch.new) for switch in read_history(store)]
    assert pairs == [(None, one), (one, two), (two, one)]


def test_an_activation_that_was_killed_before_its_rename_never_came_true(store, three):
    one, two, other = three
    activate(store, one)
    activate(store, two)
    line = f'{{"time": 1.0, "old": "{two}", "new": "{other}"}}\n{{"time": 2.0, "ol'
    with store.history.open("a") as stream:
        stream.write(line)
    assert (store.current(), previous(store)) == (two, one)
    activate(store, other)
    assert previous(store) == two


def test_without_an_earlier_release_there_is_no_way_back(store, three):
    with pytest.raises(WeightsError, match="no earlier release"):
        rollback(store)
    activate(store, three[0])
    with pytest.raises(WeightsError, match="no earlier release"):
        rollback(store)


def test_a_release_whose_file_was_written_to_is_not_activated_until_verified(store, three):
    file = store.manifest(three[0]).files[0]
    blob = store.blob(file.sha256)
    os.utime(blob, ns=(1, 1))
    with pytest.raises(WeightsError, match="written to since it was proved"):
        activate(store, three[0])
    assert read_all(store, three[0]).is_right
    activate(store, three[0])


def test_a_release_that_lost_a_link_is_not_activated(store, three):
    (store.release_folder(three[0]) / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config.json is missing"):
        activate(store, three[0])


def test_a_link_that_was_bent_out_of_the_store_is_found(store, three):
    link = store.release_folder(three[0]) / "config.json"
    link.unlink()
    link.symlink_to("/etc/hostname")
    assert check_release(store, three[0]) == [
        "config.json is not the link to its blob that it should be"
    ]


def test_a_process_that_maps_the_old_release_stops_an_activation_unless_told(store, three):
    one, two, _ = three
    activate(store, one)
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, "
        "prot=mmap.PROT_READ); f.close(); print('mapped', flush=True); sys.stdin.read()"
    )
    shard = store.pointer / BIG
    engine = subprocess.Popen(
        [sys.executable, "-c", code, str(shard)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        engine.stdout.readline()
        with pytest.raises(WeightsError, match=f"in use by process {engine.pid}"):
            activate(store, two)
        assert store.current() == one
        activate(store, two, in_use_is_fine=True)
        assert store.current() == two
    finally:
        engine.communicate()


def test_a_process_that_maps_the_same_bytes_in_another_store_stops_nothing(store, three, folder):
    other = make_store(folder / "other")
    for release in three[:2]:
        fetch(other, str(store.release_folder(release)))
        activate(store, release, in_use_is_fine=True)
    activate(store, three[0], in_use_is_fine=True)
    code = "import sys; f = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"
    shard = other.release_folder(three[0]) / BIG
    engine = subprocess.Popen(
        [sys.executable, "-c", code, str(shard)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        engine.stdout.readline()
        activate(store, three[1])
        assert store.current() == three[1]
    finally:
        engine.communicate()


def test_activation_takes_under_100_ms_for_309_gib(store, three, monkeypatch):
    # Names, marks and a manifest of 19,840 chunks take the time; blobs are sparse.
    large = add_sparse_release(store, shards=62, shard_bytes=5 << 30)
    activate(store, three[0])
    times = []
    for release in (large, three[0]) * 3:
        started = time.process_time()
        activate(store, release)
        times.append(time.process_time() - started)
    assert min(times[::2]) < 0.1, times


def test_gc_keeps_current_and_previous_and_says_what_it_frees(store, three):
    one, two, other = three
    activate(store, one)
    activate(store, two)
    (store.staging / "left.part").write_bytes(b"x" * 5000)
    told = gc(store, dry_run=True)
    assert (told.releases, store.releases()) == ((other,), sorted(three))
    before = guard.free_bytes(store.folder)
    swept = gc(store)
    assert swept.freed_bytes == told.freed_bytes
    assert guard.free_bytes(store.folder) - before >= swept.freed_bytes * 0.9
    assert store.releases() == sorted((one, two))
    assert all(read_all(store, release, full=True).is_right for release in (one, two))
    assert list(store.staging.iterdir()) == []
    assert gc(store).freed_bytes == 0


def test_rm_frees_what_only_that_release_has_and_refuses_the_current_one(store, three):
    activate(store, three[0])
    with pytest.raises(UsageError, match="current"):
        rm(store, three[0])
    uses, orphans, staged = usage(store)
    alone = {use.release: use.alone_bytes for use in uses}
    assert rm(store, three[1]).freed_bytes == alone[three[1]]
    assert (orphans, staged) == (0, 0)
    assert all(read_all(store, release, full=True).is_right for release in store.releases())


def test_a_pull_in_progress_is_safe_from_gc_and_from_a_second_pull(store, model, three):
    with store.pulling("pull of x"):
        for work in (
            lambda: gc(store),
            lambda: rm(store, three[1]),
            lambda: fetch(store, str(model)),
        ):
            with pytest.raises(WeightsError, match=rf"busy: pull of x, process {os.getpid()}"):
                work()


def test_two_pulls_at_once_one_goes_on_and_one_says_who_is_there(store, mirror, model):
    outcomes: list[object] = []

    def pull():
        try:
            outcomes.append(fetch(store, f"{mirror.url}/m").release)
        except WeightsError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert done and all("busy" in str(o) for o in outcomes if not isinstance(o, str))
    assert same_bytes(store.release_folder(done[0]), model)


def flip(store, release, path, at):
    file = next(f for f in store.manifest(release).files if f.path == path)
    blob = store.blob(file.sha256)
    kept = blob.stat()
    blob.chmod(0o644)
    with blob.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 4]))
    os.utime(blob, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    return file


def test_one_flipped_bit_is_found_and_repaired_with_its_chunk_alone(store, mirror, model):
    release = fetch(store, f"{mirror.url}/m").release
    flip(store, release, BIG, CHUNK_BYTES + 12345)
    verdict = read_all(store, release, full=True)
    assert [bad.text for bad in verdict.bad] == [
        f"{BIG}: bytes {CHUNK_BYTES:,} to {2 * CHUNK_BYTES - 1:,} are wrong"
    ]
    with pytest.raises(WeightsError):
        activate(store, release)
    mirror.requests.clear()
    source = open_source(f"{mirror.url}/m", Network())
    assert repair(store, source, verdict.bad, Transfer()) == CHUNK_BYTES
    ranges = [(r.path, r.start) for r in mirror.requests if r.start is not None]
    assert ranges == [(f"/m/{BIG}", CHUNK_BYTES)]
    assert read_all(store, release).is_right
    assert same_bytes(store.release_folder(release), model)


def test_a_blob_that_was_cut_is_repaired_too(store, mirror, model):
    release = fetch(store, f"{mirror.url}/m").release
    file = next(f for f in store.manifest(release).files if f.path == BIG)
    os.truncate(store.blob(file.sha256), CHUNK_BYTES + 5)
    verdict = read_all(store, release)
    assert len(verdict.bad) == 2 and "has not the" in verdict.problems[0]
    repair(store, open_source(f"{mirror.url}/m", Network()), verdict.bad, Transfer())
    assert read_all(store, release).is_right
    assert same_bytes(store.release_folder(release), model)


def test_only_files_that_were_written_to_are_read_unless_full(store, three):
    size = store.manifest(three[0]).size_bytes
    assert read_all(store, three[0]).read_bytes == 0
    assert read_all(store, three[0], full=True).read_bytes == size
    file = flip(store, three[0], "config.json", 3)
    verdict = read_all(store, three[0])
    assert verdict.read_bytes == file.size_bytes
    assert [bad.file.path for bad in verdict.bad] == ["config.json"]


def test_a_full_run_that_was_interrupted_does_not_read_again_what_it_proved(store, three):
    (store.marks / "full-since").write_text(f"{time.time()}\n")
    manifest = store.manifest(three[0])
    done = manifest.files[0]
    assert prove(store, done.sha256)
    verdict = read_all(store, three[0], full=True)
    assert verdict.read_bytes == manifest.size_bytes - done.size_bytes
    assert read_all(store, three[0], full=True).read_bytes == manifest.size_bytes


def test_a_manifest_that_was_changed_is_found(store, three):
    path = store.release_folder(three[0]) / MANIFEST
    text = path.read_text()
    sha = store.manifest(three[0]).files[0].sha256
    path.write_text(text.replace(sha, sha[:-1] + ("0" if sha[-1] != "0" else "1")))
    assert "it was changed" in read_all(store, three[0]).problems[0]


def test_a_scrub_keeps_to_its_rate(store, model):
    release = fetch(store, str(model)).release
    size = store.manifest(release).size_bytes
    started = time.monotonic()
    assert read_all(store, release, full=True, bytes_per_second=size).is_right
    assert time.monotonic() - started > 0.9


def test_a_read_only_store_is_verified_and_says_that_nothing_was_kept(store, three, folder):
    if os.geteuid() == 0 and subprocess.run(["mount", "--version"], capture_output=True).returncode:
        pytest.skip("root writes to read-only folders, and there is no mount")
    code = (
        "import subprocess, sys; from pathlib import Path\n"
        "subprocess.run(['mount', '--bind', sys.argv[1], sys.argv[1]], check=True)\n"
        "subprocess.run(['mount', '-o', 'remount,bind,ro', sys.argv[1]], check=True)\n"
        "from appliance.weights.store import open_store\n"
        "from appliance.weights.verify import Reading, verify\n"
        "from appliance.weights.activate import activate\n"
        "from appliance.errors import WeightsError\n"
        "store = open_store(Path(sys.argv[1]))\n"
        "v = verify(store, store.releases(), Reading(full=True), lambda d, t: None)\n"
        "print(v.is_right, v.marks_saved)\n"
        "try: activate(store, store.releases()[0])\n"
        "except WeightsError as error: print(error)\n"
    )
    repository = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", code, str(store.folder)],
        env={**os.environ, "PYTHONPATH": str(repository)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True False\n")
    assert "Read-only file system" in done.stdout and "--store" in done.stdout


def test_too_little_space_is_refused_before_the_first_byte(store):
    free = guard.free_bytes(store.folder)
    with pytest.raises(WeightsError, match=r"are to come and .* free .* bytes short"):
        check_room(store, [Wanted("a", free, sha256="0" * 64)])
    check_room(store, [Wanted("a", 1 << 20, sha256="0" * 64)])


def test_a_limit_on_file_sizes_is_refused_before_the_first_byte(store):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(WeightsError, match="may write files of 1,048,576"):
            check_room(store, [Wanted("a", 2 << 20, sha256="0" * 64)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_blob_that_lost_its_mark_is_read_again_not_fetched_again(store, mirror):
    first = fetch(store, f"{mirror.url}/m")
    for mark in store.marks.iterdir():
        mark.unlink()
    assert fetch(store, f"{mirror.url}/m").fetched_bytes == 0
    assert all(clean_mark(store, file.sha256) for file in first.manifest.files)


def test_a_corrupt_blob_is_replaced_by_a_pull(store, mirror, model):
    release = fetch(store, f"{mirror.url}/m").release
    file = flip(store, release, "config.json", 3)
    assert fetch(store, f"{mirror.url}/m").fetched_bytes == file.size_bytes
    assert same_bytes(store.release_folder(release), model)


def test_a_folder_that_holds_other_things_is_no_store(folder):
    (folder / "photo.jpg").touch()
    with pytest.raises(WeightsError, match=r"holds 'photo.jpg'"):
        make_store(folder)
    with pytest.raises(WeightsError, match="is no store"):
        open_store(folder)


def test_a_store_of_a_newer_version_is_refused(store):
    (store.folder / "FORMAT").write_text("moe-appliance weights 2\n")
    with pytest.raises(WeightsError, match="weights 2"):
        open_store(store.folder)


def test_a_release_is_found_by_the_start_of_its_id(store, three):
    assert store.find(three[0][:-4]) == three[0]
    with pytest.raises(UsageError, match="start of 3 releases"):
        store.find("m")
    with pytest.raises(UsageError, match="no release is active"):
        store.find(None)


def test_a_release_folder_can_be_moved_with_its_store(store, three, folder):
    activate(store, three[0])
    moved = Path(shutil.move(store.folder, folder / "elsewhere"))
    with (
        (moved / "current" / BIG).open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        assert len(mapped) > 1000
    verdict: Verdict = verify(open_store(moved), three, Reading(), lambda done, total: None)
    assert verdict.is_right


def test_publishing_a_store_makes_a_mirror(folder, store, server, model, filled):
    publish(server, filled[0].release_folder(filled[1].release_id), "/r")
    pulled = fetch(store, f"{server.url}/r")
    assert same_bytes(store.release_folder(pulled.release), model)
