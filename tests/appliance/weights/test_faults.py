"""Pull from a server that does everything wrong: it ends right, or says what is wrong."""

import time

import hostile_server as hostile
import pytest
from hostile_server import HostileServer, Request
from weights_models import BIG, fetch, publish, same_bytes, sums_of

from appliance.errors import SourceError
from appliance.weights.manifest import CHUNK_BYTES
from appliance.weights.network import Network
from appliance.weights.source import Again, FileChanged, RangeRefused

QUICK = Network(stall_seconds=0.3)
PASSING = [
    hostile.truncation,
    hostile.reset,
    hostile.stall,
    hostile.dribble,
    hostile.wrong_range,
    hostile.wrong_length,
    hostile.unavailable,
    hostile.wrong_bytes,
]


def is_big(request: Request) -> bool:
    return request.path.endswith(BIG)


def is_second_chunk(request: Request) -> bool:
    return is_big(request) and request.start == CHUNK_BYTES


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.__name__)
def test_what_passes_is_tried_again_until_the_bytes_are_right(fault, store, mirror, model):
    mirror.fails(fault, times=2)
    pulled = fetch(store, f"{mirror.url}/m", QUICK)
    assert same_bytes(store.release_folder(pulled.release), model)
    assert all(programme.times == 0 for programme in mirror.faults)


@pytest.mark.parametrize("fault", [hostile.truncation, hostile.reset], ids=lambda f: f.__name__)
def test_a_broken_connection_costs_no_byte_that_arrived(fault, store, mirror, model):
    mirror.fails(fault, when=is_second_chunk)
    pulled = fetch(store, f"{mirror.url}/m", QUICK)
    assert pulled.fetched_bytes == pulled.manifest.size_bytes
    starts = [request.start for request in mirror.requests if is_big(request)]
    assert any(start % CHUNK_BYTES for start in starts), "it went on inside the chunk"


def test_wrong_bytes_of_the_right_length_cost_one_chunk(store, mirror, model):
    mirror.fails(hostile.wrong_bytes, when=is_second_chunk)
    pulled = fetch(store, f"{mirror.url}/m")
    assert pulled.fetched_bytes == pulled.manifest.size_bytes + CHUNK_BYTES


def test_a_source_that_always_sends_wrong_bytes_is_named_with_the_place(store, mirror):
    mirror.fails(hostile.wrong_bytes, when=is_second_chunk, times=99)
    with pytest.raises(SourceError, match=rf"{BIG}, bytes 16,777,216 to .* wrong bytes 3 times"):
        fetch(store, f"{mirror.url}/m")
    assert store.releases() == []


def test_without_chunk_hashes_wrong_bytes_cost_the_file_once(store, server, model):
    publish(server, model)
    server.files["/m/SHA256SUMS"] = sums_of(model)
    server.fails(hostile.wrong_bytes, when=is_second_chunk)
    pulled = fetch(store, f"{server.url}/m")
    assert same_bytes(store.release_folder(pulled.release), model)
    assert pulled.fetched_bytes == pulled.manifest.size_bytes + (model / BIG).stat().st_size


def test_without_chunk_hashes_a_lying_source_is_refused(store, server, model):
    publish(server, model)
    server.files["/m/SHA256SUMS"] = sums_of(model)
    server.fails(hostile.wrong_bytes, when=is_second_chunk, times=99)
    with pytest.raises(SourceError, match="twice not what it promised"):
        fetch(store, f"{server.url}/m")
    assert store.releases() == []


def test_too_many_requests_waits_as_long_as_the_server_asks(store, mirror):
    mirror.fails(hostile.too_many)
    started = time.monotonic()
    fetch(store, f"{mirror.url}/m")
    assert time.monotonic() - started >= 1.0


def test_a_server_that_stays_away_is_given_up_with_its_last_answer(store, mirror):
    mirror.fails(hostile.unavailable, times=99)
    with pytest.raises(Again, match="503"):
        fetch(store, f"{mirror.url}/m", tries=3)


def test_a_file_that_changes_in_the_middle_is_an_error_and_then_starts_anew(store, mirror, model):
    mirror.fails(hostile.changed, when=is_second_chunk)
    with pytest.raises(FileChanged, match=f"{BIG} changed at its source"):
        fetch(store, f"{mirror.url}/m", connections=1)
    pulled = fetch(store, f"{mirror.url}/m")
    assert same_bytes(store.release_folder(pulled.release), model)


def test_a_file_that_changed_between_two_runs_is_an_error_too(store, mirror, model):
    mirror.fails(hostile.unavailable, when=is_second_chunk, times=99)
    with pytest.raises(Again):
        fetch(store, f"{mirror.url}/m", tries=2, connections=1)
    mirror.faults.clear()
    mirror.etag = "two"
    with pytest.raises(FileChanged, match=r"was .*one.*, now .*two"):
        fetch(store, f"{mirror.url}/m")


def test_416_says_which_file_and_the_next_run_starts_it_anew(store, mirror, model):
    # B029: a stale partial file made every later run fail.
    mirror.fails(hostile.not_satisfiable, when=is_second_chunk)
    with pytest.raises(RangeRefused, match=rf"{BIG} has no bytes 16777216 .*416"):
        fetch(store, f"{mirror.url}/m")
    pulled = fetch(store, f"{mirror.url}/m")
    assert same_bytes(store.release_folder(pulled.release), model)


def test_a_server_without_ranges_is_refused_with_the_way_out(store, mirror):
    mirror.fails(hostile.whole_file, when=is_second_chunk)
    with pytest.raises(SourceError, match="does not do ranges"):
        fetch(store, f"{mirror.url}/m")


def test_a_small_file_in_one_piece_needs_no_ranges(store, mirror, model):
    mirror.fails(hostile.whole_file, when=lambda request: request.path.endswith("note.txt"))
    pulled = fetch(store, f"{mirror.url}/m")
    assert same_bytes(store.release_folder(pulled.release), model)


def test_gzip_on_a_range_is_refused(store, mirror):
    mirror.fails(hostile.gzip, when=is_second_chunk)
    with pytest.raises(SourceError, match="gzip"):
        fetch(store, f"{mirror.url}/m")


def test_every_fault_at_once_still_ends_right(store, mirror, model):
    for fault in PASSING:
        mirror.fails(fault, times=1)
    pulled = fetch(store, f"{mirror.url}/m", QUICK, tries=20)
    assert same_bytes(store.release_folder(pulled.release), model)


def test_credentials_do_not_follow_a_redirect_to_another_host(store, mirror, model):
    other = HostileServer("127.0.0.2")
    try:
        other.files = mirror.files
        mirror.fails(hostile.redirect_to(other.url), times=99)
        pulled = fetch(store, f"{mirror.url}/m", Network(mirror_token="secret"))
        assert same_bytes(store.release_folder(pulled.release), model)
        assert other.requests
        assert all("Authorization" not in request.headers for request in other.requests)
        assert all(r.headers["Authorization"] == "Bearer secret" for r in mirror.requests)
    finally:
        other.close()


def test_a_redirect_that_expired_is_asked_for_again(store, mirror, model):
    other = HostileServer("127.0.0.2")
    try:
        other.files = mirror.files
        mirror.fails(hostile.redirect_to(other.url), times=99)
        other.fails(lambda handler, request, body: handler.answer(403, b""), when=is_second_chunk)
        pulled = fetch(store, f"{mirror.url}/m", connections=1)
        assert same_bytes(store.release_folder(pulled.release), model)
    finally:
        other.close()


def test_a_redirect_loop_ends(store, mirror):
    mirror.fails(hostile.redirect_to(mirror.url), times=99)
    with pytest.raises(SourceError, match="redirects"):
        fetch(store, f"{mirror.url}/m")


def test_a_busy_server_is_asked_for_the_manifest_again(store, mirror, model):
    mirror.fails(hostile.unavailable, when=lambda request: True, times=3)
    pulled = fetch(store, f"{mirror.url}/m")
    assert same_bytes(store.release_folder(pulled.release), model)


def test_no_access_says_what_to_do(store, mirror):
    mirror.fails(lambda handler, request, body: handler.answer(401, b""), when=lambda r: True)
    with pytest.raises(SourceError, match="401: not allowed without a token") as caught:
        fetch(store, f"{mirror.url}/m")
    assert "accept the model's licence" in caught.value.fix


def test_a_kept_open_connection_that_the_server_closed_is_no_failure(store, mirror, model):
    def close_after(handler, request, body):
        handler.good(request, body)
        handler.close_connection = True

    mirror.fails(close_after, times=99, when=lambda request: True)
    pulled = fetch(store, f"{mirror.url}/m", tries=1, connections=2)
    assert same_bytes(store.release_folder(pulled.release), model)
