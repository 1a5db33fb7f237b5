"""Every source: the hub, mirrors, S3, peers, folders, bundles; proxies, CAs and tokens."""

import hashlib
import json
import os
import shutil
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import hostile_server as hostile
import pytest
from hostile_server import HostileServer
from weights_models import BIG, fetch, publish, same_bytes, sums_of, write_model

from appliance.errors import CheckpointError, SourceError, UsageError
from appliance.settings import read_network, read_settings
from appliance.weights.activate import activate
from appliance.weights.manifest import CHUNK_BYTES
from appliance.weights.names import MANIFEST
from appliance.weights.network import Network, S3Keys
from appliance.weights.peer import PeerServer
from appliance.weights.s3 import sign
from appliance.weights.source import open_source
from appliance.weights.store import make_store
from appliance.weights.transport import shown

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = Path(__file__).resolve().parents[3]


def publish_as_hub(server: HostileServer, model: Path, **changes: object) -> None:
    """What huggingface.co answers: large files with sha256, small ones with a git id."""
    publish(server, model, f"/org/tiny/resolve/{COMMIT}")
    siblings = []
    for path in sorted(p for p in model.rglob("*") if p.is_file()):
        body = path.read_bytes()
        entry = {"rfilename": path.relative_to(model).as_posix(), "size": len(body)}
        if path.suffix == ".safetensors":
            entry["lfs"] = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body)}
        else:
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
        siblings.append(entry)
    answer = {"sha": COMMIT, "siblings": siblings, "cardData": {"license": "mit"}, **changes}
    server.files["/api/models/org/tiny/revision/main"] = json.dumps(answer).encode()


def test_the_hub_gives_sizes_hashes_licence_and_commit(store, server, model):
    publish_as_hub(server, model)
    pulled = fetch(store, "hf:org/tiny", Network(hub_url=server.url, hub_token="hf_secret"))
    assert same_bytes(store.release_folder(pulled.release), model)
    manifest = pulled.manifest
    assert (manifest.model, manifest.revision) == ("org/tiny", COMMIT)
    assert (manifest.licence, manifest.source) == ("mit", f"hf:org/tiny@{COMMIT}")
    assert all(r.headers["Authorization"] == "Bearer hf_secret" for r in server.requests)
    assert b"hf_secret" not in manifest.to_json()


def test_a_small_file_of_the_hub_is_held_against_its_git_id(store, server, model):
    publish_as_hub(server, model)
    server.fails(hostile.wrong_bytes, when=lambda r: r.path.endswith("note.txt"), times=99)
    with pytest.raises(SourceError, match=r"note.txt: .* twice not what it promised .git id"):
        fetch(store, "hf:org/tiny", Network(hub_url=server.url))


def test_a_hub_file_without_any_hash_is_refused(store, server, model):
    publish_as_hub(server, model, siblings=[{"rfilename": "a", "size": 3}])
    with pytest.raises(SourceError, match="no hash for 'a'"):
        fetch(store, "hf:org/tiny", Network(hub_url=server.url))


def test_a_model_that_the_hub_does_not_have_is_said_so(store, server):
    with pytest.raises(SourceError, match="no org/none at main"):
        fetch(store, "hf:org/none", Network(hub_url=server.url))


def test_a_mirror_with_sums_alone_will_do(store, server, model):
    publish(server, model)
    server.files["/m/SHA256SUMS"] = sums_of(model)
    pulled = fetch(store, f"{server.url}/m/")
    assert same_bytes(store.release_folder(pulled.release), model)


def test_a_mirror_with_nothing_to_prove_its_files_is_refused(store, server, model):
    publish(server, model)
    with pytest.raises(SourceError, match=f"neither {MANIFEST} nor SHA256SUMS"):
        fetch(store, f"{server.url}/m")


def test_a_signed_address_keeps_its_query_and_never_shows_it(store, server, model):
    publish(server, model)
    server.files["/m/SHA256SUMS"] = sums_of(model)
    pulled = fetch(store, f"{server.url}/m?X-Amz-Signature=secret")
    assert all(request.path.endswith("?X-Amz-Signature=secret") for request in server.requests)
    assert "secret" not in pulled.manifest.to_json().decode()
    server.fails(hostile.unavailable, when=lambda r: True, times=99)
    with pytest.raises(SourceError, match="503") as caught:
        fetch(make_store(store.folder.parent / "other"), f"{server.url}/n?sig=secret", tries=2)
    assert "secret" not in str(caught.value)


def test_a_password_in_an_address_is_refused_because_ps_shows_it():
    with pytest.raises(UsageError, match="`ps` shows") as caught:
        open_source("https://user:secret@mirror/m", Network())
    assert "secret" not in str(caught.value)


def test_s3_requests_are_signed_as_in_the_worked_example_of_the_reference():
    # Source: Amazon S3 API Reference, "Signature Calculations for the Authorization Header",
    # example GET Object (with Range: bytes=0-9).
    keys = S3Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    parts = urlsplit("https://examplebucket.s3.amazonaws.com/test.txt")
    headers = sign(
        "GET", parts, {"Range": "bytes=0-9"}, keys, "us-east-1",
        datetime(2013, 5, 24, tzinfo=UTC),
    )  # fmt: skip
    assert headers["Authorization"].endswith(
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )


def test_an_s3_prefix_is_a_mirror_whose_requests_carry_a_signature(store, mirror, model):
    mirror.files = {f"/bucket{path}": body for path, body in mirror.files.items()}
    network = Network(s3_endpoint=mirror.url, s3_keys=S3Keys("id", "key", "session"))
    pulled = fetch(store, "s3://bucket/m", network)
    assert same_bytes(store.release_folder(pulled.release), model)
    assert all("AWS4-HMAC-SHA256" in r.headers["Authorization"] for r in mirror.requests)
    assert all(r.headers["x-amz-security-token"] == "session" for r in mirror.requests)


@pytest.fixture
def peer(filled):
    with PeerServer(filled[0], ("127.0.0.1", 0), token="lan") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_one_box_feeds_the_next(store, peer, filled, model):
    url = f"http://127.0.0.1:{peer.server_address[1]}"
    release = filled[1].release_id
    pulled = fetch(store, f"{url}/releases/{release}", Network(mirror_token="lan"))
    assert pulled.release == release
    assert same_bytes(store.release_folder(release), model)


def test_a_reader_slower_than_the_peer_gets_all_of_a_range_on_one_connection(peer, filled):
    import http.client

    release = filled[1].release_id
    big = next(f for f in filled[1].files if f.path == BIG)
    port = peer.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for _ in range(2):
        connection.request("GET", f"/releases/{release}/{BIG}", headers={
            "Authorization": f"Bearer {peer.token}", "Range": f"bytes=100-{CHUNK_BYTES}",
        })  # fmt: skip
        answer = connection.getresponse()
        time.sleep(0.3)  # far more than the sockets' buffers hold: the peer has to wait for us
        assert len(answer.read()) == CHUNK_BYTES - 99 < big.size_bytes
    connection.close()


def test_a_peer_serves_nobody_without_its_token(store, peer, filled):
    url = f"http://127.0.0.1:{peer.server_address[1]}/releases/{filled[1].release_id}"
    with pytest.raises(SourceError, match="401: not allowed with the token that was sent"):
        fetch(store, url, Network(mirror_token="other"))


@pytest.mark.parametrize(
    "path", ["../FORMAT", "%2e%2e/%2e%2e/FORMAT", "/etc/passwd", "appliance-manifest.json/x"]
)
def test_a_peer_serves_nothing_but_files_of_releases(path, peer, filled):
    assert peer.file(f"/releases/{filled[1].release_id}/{path}") is None
    assert peer.file(f"/releases/../{path}") is None


def test_a_folder_is_copied_and_proved(store, model):
    pulled = fetch(store, str(model))
    assert same_bytes(store.release_folder(pulled.release), model)


def test_a_folder_with_sums_that_disagree_is_refused(folder, store, model):
    bad = Path(shutil.copytree(model, folder / "bad"))
    (bad / "SHA256SUMS").write_bytes(sums_of(model))
    (bad / "config.json").write_text("{}")
    with pytest.raises(SourceError, match=r"sent config.json with other bytes than it promised"):
        fetch(store, str(bad))


def test_a_link_that_leads_out_of_the_folder_is_refused(folder, store, model):
    bad = Path(shutil.copytree(model, folder / "bad"))
    (bad / "extra.json").symlink_to("/etc/passwd")
    with pytest.raises(SourceError, match="leads out of the folder"):
        fetch(store, str(bad))


def test_a_snapshot_of_the_hubs_own_cache_is_a_folder_too(folder, store, model):
    cache = folder / "models--org--tiny"
    (cache / "snapshots" / COMMIT / "docs").mkdir(parents=True)
    shutil.copytree(model, cache / "blobs")
    for path in model.rglob("*"):
        if path.is_file():
            name = path.relative_to(model)
            link = cache / "snapshots" / COMMIT / name
            link.symlink_to(os.path.relpath(cache / "blobs" / name, link.parent))
    pulled = fetch(store, str(cache / "snapshots" / COMMIT))
    assert same_bytes(store.release_folder(pulled.release), model)


def test_a_git_lfs_pointer_is_named_before_a_byte_is_copied(folder, store, model):
    # B032: 130-byte pointer files where the weights should be.
    bad = Path(shutil.copytree(model, folder / "bad"))
    (bad / BIG).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(SourceError, match=rf"{BIG} is a Git LFS pointer"):
        fetch(store, str(bad))
    assert not list(store.staging.iterdir())


def test_a_shard_that_the_index_does_not_list_makes_no_release(folder, store, model):
    # B035, and what vLLM would skip in silence.
    bad = Path(shutil.copytree(model, folder / "bad"))
    index = json.loads((bad / "model.safetensors.index.json").read_text())
    keep = {n: s for n, s in index["weight_map"].items() if s == BIG}
    (bad / "model.safetensors.index.json").write_text(json.dumps({"weight_map": keep}))
    with pytest.raises(CheckpointError, match="silently skip"):
        fetch(store, str(bad))
    assert store.releases() == []


@pytest.mark.parametrize("damage", ["index", "pointer", "config"])
def test_what_would_not_load_is_known_before_a_shard_is_fetched(
    damage, folder, store, server, model
):
    bad = Path(shutil.copytree(model, folder / "bad"))
    if damage == "index":
        index = json.loads((bad / "model.safetensors.index.json").read_text())
        keep = {n: s for n, s in index["weight_map"].items() if s == BIG}
        (bad / "model.safetensors.index.json").write_text(json.dumps({"weight_map": keep}))
    elif damage == "pointer":
        (bad / BIG).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    else:
        (bad / "config.json").unlink()
    publish(server, bad)
    server.files["/m/SHA256SUMS"] = sums_of(bad)
    says = {
        "index": "silently skip",
        "pointer": f"{BIG} is a Git LFS pointer",
        "config": "no config",
    }
    with pytest.raises(CheckpointError, match=says[damage]) as caught:
        fetch(store, f"{server.url}/m")
    assert "look-" not in str(caught.value) and server.url in str(caught.value)
    shards = [r for r in server.requests if r.path.endswith(".safetensors")]
    assert sum(r.stop - r.start for r in shards) < 2 << 20
    assert list(store.staging.iterdir()) == []


def test_a_short_shard_makes_no_release(folder, store, model):
    # B028: the download ends short.
    bad = Path(shutil.copytree(model, folder / "bad"))
    os.truncate(bad / BIG, (bad / BIG).stat().st_size - 1000)
    with pytest.raises(CheckpointError, match=f"{BIG} is cut short"):
        fetch(store, str(bad))
    assert store.releases() == []


def test_requests_go_through_the_proxy_of_the_environment(store, server, model):
    proxied = HostileServer()
    try:
        publish(proxied, model, f"{server.url}/m")
        proxied.files[f"{server.url}/m/SHA256SUMS"] = sums_of(model)
        # A proxy gets whole addresses; the path of one is not what urlsplit makes of it here.
        proxied.files = {urlsplit(path).path: body for path, body in proxied.files.items()}
        network = read_network(
            read_settings({}), {"http_proxy": proxied.url.replace("//", "//me:word@"), "HOME": "/"}
        )
        pulled = fetch(store, f"{server.url}/m", network)
        assert same_bytes(store.release_folder(pulled.release), model)
        assert not server.requests
        assert all(r.path.startswith(f"{server.url}/m/") for r in proxied.requests)
        assert all(r.headers["Proxy-Authorization"].startswith("Basic ") for r in proxied.requests)
    finally:
        proxied.close()


def test_no_proxy_names_hosts_and_suffixes():
    network = Network(http_proxy="http://p", no_proxy=("localhost", ".lan", "10.0.0.7"))
    direct = ("localhost", "box.lan", "a.box.lan", "10.0.0.7")
    assert [network.proxy_for("http", host) for host in direct] == [None] * 4
    assert network.proxy_for("http", "example.org") == "http://p"
    assert network.proxy_for("http", "notlocalhost") == "http://p"


def test_secrets_do_not_show_in_a_repr_or_an_address():
    secrets = [f"secret-{number}" for number in range(4)]
    keys = S3Keys("id", *secrets[:2])
    network = Network(hub_token=secrets[2], mirror_token=secrets[3], s3_keys=keys)
    assert "secret-" not in repr(network)
    assert shown("https://u:p@host/path?token=x#y") == "https://host/path"


def test_a_token_comes_from_a_file(tmp_path):
    (tmp_path / "token").write_text("  hf_abc\n")
    network = read_network(read_settings({}), {"HF_TOKEN_PATH": str(tmp_path / "token")})
    assert network.hub_token == "hf_abc"
    (tmp_path / "token").write_text("\n")
    with pytest.raises(UsageError, match="holds no token"):
        read_network(read_settings({}), {"HF_TOKEN_PATH": str(tmp_path / "token")})


def test_files_that_two_revisions_share_are_fetched_once(store, folder, model, server):
    other = Path(shutil.copytree(model, folder / "other"))
    (other / "docs" / "note.txt").write_text("changed\n")
    first = fetch(store, str(model))
    publish(server, other)
    server.files["/m/SHA256SUMS"] = sums_of(other)
    second = fetch(store, f"{server.url}/m")
    assert second.fetched_bytes == len("changed\n")
    assert second.reused_bytes == second.manifest.size_bytes - second.fetched_bytes
    assert first.release != second.release
    activate(store, second.release)
    assert same_bytes(store.pointer, other)


def test_other_seeds_make_other_models(folder):
    """The builder's promise, on which the tests above stand."""
    one, two = (write_model(folder / str(seed), seed, rows=8) for seed in (1, 2))
    assert (one / BIG).read_bytes() != (two / BIG).read_bytes()
