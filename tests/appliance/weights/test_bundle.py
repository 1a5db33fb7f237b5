"""Bundles: what goes in, that it restores by hand, and that it crosses without any network."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from weights_models import BIG, fetch, same_bytes, write_model

from appliance.cli import run
from appliance.errors import SourceError, UsageError, WeightsError
from appliance.weights.bundle import BundleSource, install_extras
from appliance.weights.bundle_write import create_bundle
from appliance.weights.collect import Beside, chart_version, collect
from appliance.weights.images import images_in
from appliance.weights.manifest import CHUNK_BYTES

REPOSITORY = Path(__file__).resolve().parents[3]


def save_archive(path: Path, *, oci: bool = False, damage: bool = False) -> str:
    """An archive as `docker save` writes it (20.10, or an OCI layout): one layer; gives its id."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as layer:
        layer.addfile(tarfile.TarInfo("etc/appliance"))
    data = inner.getvalue()
    diff = hashlib.sha256(data).hexdigest()
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{diff}"]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
    digest = hashlib.sha256(config).hexdigest()
    data = data[:-1] + b"x" if damage else data
    if oci:
        manifest = json.dumps({
            "config": {"digest": f"sha256:{digest}"}, "layers": [{"digest": f"sha256:{diff}"}],
        }).encode()  # fmt: skip
        named = hashlib.sha256(manifest).hexdigest()
        name = {"io.containerd.image.name": "org/engine:1.0"}
        index = {"manifests": [{"digest": f"sha256:{named}", "annotations": name}]}
        blobs = {digest: config, diff: data, named: manifest}
        files = {f"blobs/sha256/{sha}": body for sha, body in blobs.items()}
        files["index.json"] = json.dumps(index).encode()
    else:
        entry = {
            "Config": f"{digest}.json",
            "RepoTags": ["org/engine:1.0"],
            "Layers": ["1/layer.tar"],
        }
        files = {f"{digest}.json": config, "1/layer.tar": data}
        files["manifest.json"] = json.dumps([entry]).encode()
    with tarfile.open(path, "w") as archive:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return f"sha256:{digest}"


def beside(folder: Path) -> Beside:
    return collect(
        images=[str(folder / "engine.tar"), "other@sha256:" + "0" * 64],
        chart=folder / "appliance",
        docs=[folder / "README.txt"],
        saved=folder,
        environment={},
    )


@pytest.fixture
def bundle(folder, filled):
    store, manifest = filled
    chart = folder / "appliance"
    chart.mkdir()
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: appliance\nversion: 1.2.3\n")
    (folder / "README.txt").write_text("how to\n")
    save_archive(folder / "engine.tar")
    create_bundle(
        store,
        manifest.release_id,
        folder / "bundle",
        beside=beside(folder),
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
    assert (folder / "extras" / "chart" / "appliance" / "Chart.yaml").is_file()


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
    assert (folder / "out" / "docs" / "README.txt").read_text() == "how to\n"
    archive = folder / "out" / "images" / "engine.tar"
    ((name, digest),) = images_in(archive).items()
    assert f"docker load --input {archive}" in done.stderr
    assert f"image {name}@{digest}" in done.stderr and "chart appliance 1.2.3" in done.stderr


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
    assert not (folder / "out" / "docs" / "README.txt").exists()


def test_a_bundle_that_was_interrupted_goes_on_with_the_next_part(bundle, folder, filled):
    parts = sorted(bundle.glob("part-*.tar"))
    before = {part: part.stat().st_mtime_ns for part in parts[:3]}
    for part in parts[3:]:
        part.unlink()
    (bundle / "SHA256SUMS").unlink()
    create_bundle(
        filled[0], filled[1].release_id, bundle,
        beside=beside(folder),
        part_bytes=5 << 20, observe=lambda done, total: None,
    )  # fmt: skip
    assert {part: part.stat().st_mtime_ns for part in parts[:3]} == before
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=bundle, check=True)


def test_a_folder_with_another_bundle_is_left_alone(bundle, filled):
    with pytest.raises(WeightsError, match="holds another bundle"):
        create_bundle(
            filled[0], filled[1].release_id, bundle, beside=Beside(),
            part_bytes=5 << 20, observe=lambda done, total: None,
        )  # fmt: skip


@pytest.mark.parametrize("oci", [False, True])
def test_an_image_is_named_by_the_id_that_loading_it_gives(oci, tmp_path):
    digest = save_archive(tmp_path / "engine.tar", oci=oci)
    assert images_in(tmp_path / "engine.tar") == {"org/engine:1.0": digest}


@pytest.mark.parametrize("oci", [False, True])
def test_an_archive_with_a_damaged_layer_is_refused(oci, tmp_path):
    save_archive(tmp_path / "engine.tar", oci=oci, damage=True)
    with pytest.raises(UsageError, match=r"layer .* is damaged"):
        images_in(tmp_path / "engine.tar")


@pytest.mark.parametrize("cut", [0, 700, 5000])
def test_an_archive_cut_short_is_refused(cut, tmp_path):
    save_archive(tmp_path / "engine.tar")
    whole = (tmp_path / "engine.tar").read_bytes()
    (tmp_path / "engine.tar").write_bytes(whole[:cut])
    with pytest.raises(UsageError, match="is no whole image archive"):
        images_in(tmp_path / "engine.tar")


def test_an_image_that_nobody_has_says_how_to_get_an_archive(tmp_path):
    with pytest.raises(WeightsError, match=r"no docker here|docker save no-such-image.* failed"):
        collect(images=["no-such-image"], saved=tmp_path, environment={"PATH": "/usr/bin:/bin"})


def test_a_folder_that_is_no_chart_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"there is no Chart\.yaml in it"):
        chart_version(tmp_path)


def test_the_repositorys_own_chart_and_documents_are_collected(tmp_path):
    found = collect(
        chart=REPOSITORY / "helm", docs=[REPOSITORY / "docs"], saved=tmp_path, environment={}
    )
    assert found.chart is not None and found.chart.startswith("moe-appliance ")
    assert found.files["chart/helm/Chart.yaml"] == REPOSITORY / "helm" / "Chart.yaml"
    assert "docs/docs/security.md" in found.files
    assert found.missing == ["images (--image NAME)"]


def test_create_says_what_a_closed_network_would_miss(folder, capfd):
    model = write_model(folder / "small", 1, rows=8)
    words = ["--store", str(folder / "store"), "--quiet"]
    assert run(["weights", "pull", str(model), "--activate", *words]) == 0
    save_archive(folder / "engine.tar")
    image = ["--image", str(folder / "engine.tar")]
    assert run(["weights", "bundle", "create", str(folder / "out"), *image, *words]) == 0
    said = capfd.readouterr().err
    assert "image org/engine:1.0@sha256:" in said
    assert "not in it: chart (--chart DIR), docs (--docs DIR)" in said
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_two_that_write_the_same_bundle_do_not_mix(bundle, filled):
    from appliance.weights.guard import alone_in

    with alone_in(bundle), pytest.raises(WeightsError, match="another process writes into"):
        create_bundle(
            filled[0], filled[1].release_id, bundle, beside=Beside(), part_bytes=5 << 20,
            observe=lambda done, total: None,
        )  # fmt: skip
