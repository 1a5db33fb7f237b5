"""Signatures: what is asked for is checked before the first byte, and travels with the manifest."""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import minisign
import pytest
from hostile_server import HostileServer
from hub_server import Hub
from weights_models import fetch, publish, same_bytes, write_model

from appliance.cli import run
from appliance.errors import UsageError, WeightsError
from appliance.weights.activate import activate
from appliance.weights.bundle import BundleSource
from appliance.weights.bundle_write import create_bundle
from appliance.weights.collect import Beside
from appliance.weights.manifest import File, Manifest, read_manifest
from appliance.weights.names import MANIFEST
from appliance.weights.signature import Keys, read_keys, sign
from appliance.weights.source import open_source
from appliance.weights.store import Store, make_store
from appliance.weights.verify import Reading, verify

MINISIGN_KEY = """untrusted comment: minisign public key C1651E4FA5C283CE
RWTOg8KlTx5lwR2DybF4Kt6NqNSkzwWprWKZhlGMAXZkmd7sNPOXqVNt
"""
BY_MINISIGN = """untrusted comment: signature from minisign secret key
RUTOg8KlTx5lwfpIuxpW44FeHpzpd7FvCHAhBbRI/yQn1aS+esk2VxA+ab6kABicaMf6emYkiiEMUjcLnG04zemzSdHy5OkqUQE=
trusted comment: made by minisign 0.11
hckVq5xh6JgFX7jVV931IHPPI+M7uxtv7DDTSAfV3YkGEKIdjx3QPrLPCCONbqJf69iB+Pll4VYWIBrxZzbgDg==
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A key pair as minisign keeps it: secret in key, public in key.pub."""
    pair = minisign.KeyPair.generate()
    (tmp_path / "key").write_bytes(bytes(pair.secret_key) + b"\n")
    (tmp_path / "key.pub").write_bytes(bytes(pair.public_key) + b"\n")
    return tmp_path / "key"


@pytest.fixture
def keys(secret: Path) -> Keys:
    return read_keys(secret.with_suffix(".pub"))


@pytest.fixture
def small(folder: Path) -> Path:
    return write_model(folder / "small", seed=1, rows=8)


@pytest.fixture
def manifest(small: Path, folder: Path) -> Manifest:
    return fetch(make_store(folder / "publisher"), str(small)).manifest


@pytest.fixture
def careful(folder: Path, keys: Keys) -> Store:
    """A store that takes nothing unsigned."""
    return make_store(folder / "careful", keys)


def offered(server: HostileServer, small: Path, manifest: Manifest) -> str:
    publish(server, small)
    server.files[f"/m/{MANIFEST}"] = manifest.to_json()
    return f"{server.url}/m"


def test_a_signed_release_is_pulled_verified_and_activated_and_stays_signed(
    careful, server, small, manifest, secret
):
    pulled = fetch(careful, offered(server, small, sign(manifest, secret, None)))
    assert same_bytes(careful.release_folder(pulled.release), small)
    verdict = verify(careful, [pulled.release], Reading(full=True), lambda done, total: None)
    assert verdict.is_right, verdict
    activate(careful, pulled.release)
    again = fetch(make_store(careful.folder.parent / "next", careful.keys), str(careful.pointer))
    assert again.manifest.signature == pulled.manifest.signature is not None


def test_an_unsigned_release_is_refused_before_a_byte_of_it(careful, server, small, manifest):
    url = offered(server, small, manifest)
    with pytest.raises(WeightsError, match="is not signed, and a signature by a key in"):
        fetch(careful, url)
    assert {request.path for request in server.requests} == {f"/m/{MANIFEST}"}


@pytest.mark.parametrize("field", ["model", "licence", "chunk", "size", "path"])
def test_any_word_changed_after_signing_is_refused(field, careful, server, small, manifest, secret):
    signed = sign(manifest, secret, None)
    first = signed.files[0]
    other = {
        "chunk": {"chunks": ("0" * 64,) * len(first.chunks)},
        "size": {"size_bytes": first.size_bytes + 1},
        "path": {"path": first.path + "x"},
    }
    if field in other:
        change = {"files": (first.model_copy(update=other[field]), *signed.files[1:])}
    else:
        change = {field: "another"}
    with pytest.raises(WeightsError, match="the signature is not right: none of the 1 keys"):
        fetch(careful, offered(server, small, signed.model_copy(update=change)))
    assert careful.releases() == [] and not any((careful.folder / "blobs").iterdir())


def test_another_publishers_signature_is_refused(careful, server, small, manifest, tmp_path):
    stranger = tmp_path / "stranger"
    stranger.write_bytes(bytes(minisign.KeyPair.generate().secret_key))
    with pytest.raises(WeightsError, match="the signature is not right"):
        fetch(careful, offered(server, small, sign(manifest, stranger, None)))


def test_what_is_no_signature_at_all_is_refused(careful, server, small, manifest):
    nonsense = manifest.model_copy(update={"signature": "signed, honestly\n"})
    with pytest.raises(WeightsError, match="none of minisign's"):
        fetch(careful, offered(server, small, nonsense))


def test_a_store_filled_before_the_key_was_set_activates_and_verifies_nothing_unsigned(
    store, keys, small, secret
):
    release = fetch(store, str(small)).release
    strict = replace(store, keys=keys)
    with pytest.raises(WeightsError, match="the manifest is not signed"):
        activate(strict, release)
    verdict = verify(strict, [release], Reading(), lambda done, total: None)
    assert "the manifest is not signed" in verdict.problems[0]
    # The same files from a source that signs them: nothing comes again but the signature.
    (small / MANIFEST).write_bytes(sign(store.manifest(release), secret, None).to_json())
    again = fetch(strict, str(small))
    assert (again.release, again.fetched_bytes) == (release, 0)
    activate(strict, release)


def test_a_bundle_carries_the_signature(careful, store, small, manifest, secret, folder):
    (small / MANIFEST).write_bytes(sign(manifest, secret, None).to_json())
    release = fetch(store, str(small)).release
    create_bundle(
        store, release, folder / "bundle", beside=Beside(), part_bytes=5 << 20,
        observe=lambda done, total: None,
    )  # fmt: skip
    assert BundleSource(folder / "bundle").bundle.manifest.signature
    activate(careful, fetch(careful, str(folder / "bundle")).release)


def test_the_hub_has_no_signatures_so_a_signed_manifest_comes_beside(
    careful, folder, small, manifest, secret, monkeypatch
):
    import threading

    signed = folder / "signed.json"
    signed.write_bytes(sign(manifest, secret, None).to_json())
    hub = Hub(small)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_address[1]}")
    monkeypatch.setenv("APPLIANCE_WEIGHTS_PUBLIC_KEY", str(secret.with_suffix(".pub")))
    words = ["weights", "pull", "hf:org/tiny", "--store", str(careful.folder), "--quiet"]
    try:
        assert run(words) == 1
        assert run([*words, "--manifest", str(signed), "--activate"]) == 0
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
    assert same_bytes(careful.pointer, small)


def test_a_signature_that_minisign_itself_made_is_accepted(tmp_path):
    """Made with `minisign -Sm` of minisign 0.11 over what `weights sign --statement` printed."""
    braces = hashlib.sha256(b"{}").hexdigest()
    files = (
        File(path="empty", size_bytes=0, sha256=hashlib.sha256(b"").hexdigest(), chunks=()),
        File(path="config.json", size_bytes=2, sha256=braces, chunks=(braces,)),
    )
    manifest = Manifest(
        model="org/tiny", revision=None, licence="apache-2.0", source="anywhere", files=files,
        signature=BY_MINISIGN,
    )  # fmt: skip
    (tmp_path / "pub").write_text(MINISIGN_KEY)
    keys = read_keys(tmp_path / "pub")
    keys.check(manifest, "the manifest")
    with pytest.raises(WeightsError, match="the signature is not right"):
        keys.check(manifest.model_copy(update={"revision": "main"}), "the manifest")


def test_sign_takes_a_key_with_a_password_and_a_wrong_one_is_a_sentence(
    folder, small, tmp_path, capfd
):
    pair = minisign.KeyPair.generate()
    (tmp_path / "pub").write_bytes(bytes(pair.public_key))
    pair.secret_key.encrypt("open sesame", opslimit=1 << 15, memlimit=1 << 24)
    (tmp_path / "key").write_bytes(bytes(pair.secret_key))
    (tmp_path / "right").write_text("open sesame\n")
    (tmp_path / "wrong").write_text("open barley\n")
    release = fetch(make_store(folder / "store"), str(small)).release
    words = ["weights", "sign", release, "--store", str(folder / "store"), "--key"]
    words += [str(tmp_path / "key"), "--password-file"]
    assert run([*words, str(tmp_path / "wrong")]) == 2
    assert "wrong password" in capfd.readouterr().err
    assert run([*words, str(tmp_path / "right")]) == 0
    out = capfd.readouterr()
    assert "open sesame" not in out.out + out.err
    signed = read_manifest(folder / "store" / "releases" / release / MANIFEST)
    read_keys(tmp_path / "pub").check(signed, release)


def test_a_file_that_holds_no_key_says_so(tmp_path):
    for content in ("", "untrusted comment: nothing else\n", "not base64 at all\n"):
        (tmp_path / "pub").write_text(content)
        with pytest.raises(UsageError, match="holds no public key"):
            read_keys(tmp_path / "pub")


def test_bytes_other_than_the_manifests_are_refused_before_they_are_fetched(
    store, small, manifest, folder
):
    from appliance.weights.fetch import Transfer
    from appliance.weights.held import HeldSource
    from appliance.weights.network import Network
    from appliance.weights.pull import pull

    (small / "config.json").write_text((small / "config.json").read_text() + " ")
    source = HeldSource(open_source(str(small), Network()), manifest)
    with pytest.raises(WeightsError, match=r"another config\.json than the manifest"):
        pull(store, source, Transfer(), lambda moment: None)


def test_what_is_not_installed_is_named_with_the_pip_of_this_python(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "minisign", None)
    (tmp_path / "key.pub").write_text(MINISIGN_KEY)
    with pytest.raises(UsageError, match="py-minisign, which is not installed") as refused:
        read_keys(tmp_path / "key.pub")
    assert refused.value.fix == f"{sys.executable} -m pip install 'moe-appliance[signing]'"
