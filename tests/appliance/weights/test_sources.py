"""Every source: the hub, mirrors, S3, peers, folders, bundles; proxies, CAs and tokens."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import hostile_server as hostile
import pytest
from hostile_server import HostileServer
from weights_models import BIG, fetch, publish, same_bytes, sums_of, write_model

from appliance.errors import CheckpointError, SourceError, UsageError, WeightsError
from appliance.settings import read_network, read_settings
from appliance.weights.activate import activate
from appliance.weights.bundle import BundleSource, install_extras
from appliance.weights.bundle_write import create_bundle
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


@pytest.fixture
def bundle(folder, filled):
    store, manifest = filled
    (folder / "chart").mkdir()
    (folder / "chart" / "appliance.tgz").write_bytes(b"chart")
    (folder / "README.txt").write_text("how to\n")
    create_bundle(
        store,
        manifest.release_id,
        folder / "bundle",
        extras=[folder / "chart", folder / "README.txt"],
        images={"appliance": "sha256:" + "0" * 64},
        part_bytes=5 << 20,
        observe=lambda done, total: None,
    )
    return folder / "bundle"


def test_a_bundle_comes_in_parts_with_sums_and_restores_by_hand(bundle, folder, model):
    parts = sorted(bundle.glob("part-*.tar"))
    assert len(parts) == 7
    assert {part.stat().st_size for part in parts[:-1]} == {5 << 20}
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=bundle, check=True)
    with subprocess.Popen(["cat", *parts], stdout=subprocess.PIPE) as cat:
        subprocess.run(["tar", "x", "-C", folder], stdin=cat.stdout, check=True)
    assert same_bytes(folder / "weights", model)
    assert (folder / "extras" / "chart" / "appliance.tgz").read_bytes() == b"chart"


def test_a_bundle_is_imported_where_there_is_no_network(bundle, folder, model):
    command = [sys.executable, "-m", "appliance.cli", "weights", "bundle", "import", str(bundle)]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}",
        "APPLIANCE_WEIGHTS_DIR": str(folder / "closed"),
    }
    done = subprocess.run(
        ["unshare", "--net", *command, "--extras", str(folder / "out")],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    release = done.stdout.strip()
    assert same_bytes(folder / "closed" / "releases" / release, model)
    assert (folder / "out" / "README.txt").read_text() == "how to\n"
    assert "image appliance@sha256:000" in done.stderr


def test_a_part_on_another_medium_is_asked_for_and_then_it_goes_on(bundle, folder, store, model):
    medium = folder / "second"
    medium.mkdir()
    part = sorted(bundle.glob("part-*.tar"))[3]
    part.rename(medium / part.name)
    with pytest.raises(SourceError, match=rf"{part.name} \(4 of 7\) is not in"):
        fetch(store, str(bundle))
    assert list(store.staging.glob("*.journal"))
    from appliance.weights.fetch import Transfer
    from appliance.weights.pull import pull

    pulled = pull(store, BundleSource([bundle, medium]), Transfer(), lambda moment: None)
    assert same_bytes(store.release_folder(pulled.release), model)


def test_a_damaged_part_is_found_and_named_by_file_and_place(bundle, folder, store):
    part = sorted(bundle.glob("part-*.tar"))[1]
    with part.open("r+b") as stream:
        stream.seek(1000)
        byte = stream.read(1)
        stream.seek(1000)
        stream.write(bytes([byte[0] ^ 1]))
    with pytest.raises(SourceError, match=f"{BIG}, bytes 0 to {CHUNK_BYTES - 1:,}: .* wrong bytes"):
        fetch(store, str(bundle))
    assert store.releases() == []


def test_a_damaged_extra_is_not_installed(bundle, folder):
    part = sorted(bundle.glob("part-*.tar"))[-1]
    part.write_bytes(part.read_bytes().replace(b"how to", b"how no"))
    with pytest.raises(SourceError, match=r"README.txt in the bundle has sha256"):
        install_extras(BundleSource(bundle), folder / "out")
    assert not (folder / "out" / "README.txt").exists()


def test_a_bundle_that_was_interrupted_goes_on_with_the_next_part(bundle, folder, filled):
    parts = sorted(bundle.glob("part-*.tar"))
    before = {part: part.stat().st_mtime_ns for part in parts[:3]}
    for part in parts[3:]:
        part.unlink()
    (bundle / "SHA256SUMS").unlink()
    create_bundle(
        filled[0], filled[1].release_id, bundle,
        extras=[folder / "chart", folder / "README.txt"],
        images={"appliance": "sha256:" + "0" * 64},
        part_bytes=5 << 20, observe=lambda done, total: None,
    )  # fmt: skip
    assert {part: part.stat().st_mtime_ns for part in parts[:3]} == before
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=bundle, check=True)


def test_a_folder_with_another_bundle_is_left_alone(bundle, filled):
    with pytest.raises(WeightsError, match="holds another bundle"):
        create_bundle(
            filled[0], filled[1].release_id, bundle, extras=[], images={},
            part_bytes=5 << 20, observe=lambda done, total: None,
        )  # fmt: skip


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
