"""Image archives for a bundle: as given, or saved by Docker; every byte held against its digest.

Reads what `docker save` writes, of old (manifest.json, layers by folder) and new (an OCI layout),
and OCI layouts of other tools. An image is named by its id, the sha256 of its configuration: the
one name that `docker load` on the other side gives it again. Source: Docker image specification
v1.2; OCI image layout 1.0.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from appliance import durable, process
from appliance.errors import UsageError, WeightsError

MAX_JSON_BYTES = 16 << 20
_REF_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_BLOBS = "blobs/sha256/"


def images_in(archive: Path) -> dict[str, str]:
    """Name -> `sha256:...` of every image in an archive. Raises UsageError for what is not whole.

    An image without a name is named by the archive's file.
    """
    try:
        with tarfile.open(archive) as tar:
            found = dict(_images(tar, archive.name.removesuffix(".tar")))
    except _Wrong as wrong:
        raise UsageError(f"{archive}: {wrong}", fix="save the image again") from wrong
    except (OSError, tarfile.TarError, KeyError, TypeError, IndexError) as error:
        raise UsageError(
            f"{archive} is no whole image archive: {type(error).__name__}: {error}",
            fix="docker save NAME -o FILE",
        ) from error
    if not found:
        raise UsageError(f"{archive} holds no image", fix="docker save NAME -o FILE")
    return found


def save_image(name: str, folder: Path, environment: Mapping[str, str]) -> Path:
    """Docker's own archive of one image, complete in `folder` or not there at all; kept if it is.

    Raises WeightsError with Docker's words.
    """
    path = folder / f"image-{hashlib.sha256(name.encode()).hexdigest()[:12]}.tar"
    if path.exists():
        return path
    aside, log = path.with_suffix(durable.ASIDE), path.with_suffix(".log")
    try:
        code = process.run(
            ["docker", "save", "--output", str(aside), name], environment=environment, log=log
        )
        if code:
            words = " ".join(log.read_text("utf-8", "replace").split())[-300:]
            raise WeightsError(
                f"docker save {name} failed: {words or f'exit code {code}'}",
                fix=f"docker pull {name}, or give an archive instead: --image FILE.tar",
            )
    except FileNotFoundError as error:
        raise WeightsError(
            f"{name} is no file, and there is no docker here to save an image with that name",
            fix="make the archive where Docker is: docker save NAME -o FILE; then --image FILE",
        ) from error
    finally:
        log.unlink(missing_ok=True)
    with aside.open("rb") as stream:
        os.fsync(stream.fileno())
    aside.replace(path)
    durable.sync_folder(folder)
    return path


class _Wrong(Exception):
    """What is wrong with an archive, in words."""


def _images(tar: tarfile.TarFile, unnamed: str) -> Iterator[tuple[str, str]]:
    names = set(tar.getnames())
    if "manifest.json" in names:
        for entry in _json(tar, "manifest.json"):
            digest = _config(tar, entry["Config"], entry["Layers"])
            for name in entry.get("RepoTags") or [unnamed]:
                yield name, digest
        return
    for found in _json(tar, "index.json")["manifests"]:
        manifest = _json(tar, _blob(tar, found["digest"]))
        if "config" not in manifest:
            raise _Wrong("it holds an index of several platforms: export one of them")
        layers = [_path(layer["digest"]) for layer in manifest["layers"]]
        notes = found.get("annotations") or {}
        name = next((notes[key] for key in _REF_NAMES if key in notes), unnamed)
        yield name, _config(tar, _path(manifest["config"]["digest"]), layers)


def _config(tar: tarfile.TarFile, path: str, layers: list[str]) -> str:
    """The image's id, once its configuration and every layer are what they should be."""
    digest = _sha256(tar, path)
    named = path.removeprefix(_BLOBS).removesuffix(".json")
    inside = _json(tar, path)["rootfs"]["diff_ids"]
    if digest != named or len(inside) != len(layers):
        raise _Wrong(f"the configuration {path} is not what its name says")
    for layer, diff in zip(layers, inside, strict=True):
        # A blob is named by its own digest; a layer of an old archive is held against the config.
        wanted = layer.removeprefix(_BLOBS) if layer.startswith(_BLOBS) else diff[len("sha256:") :]
        if _sha256(tar, layer) != wanted:
            raise _Wrong(f"layer {layer} is damaged")
    return f"sha256:{digest}"


def _blob(tar: tarfile.TarFile, digest: str) -> str:
    path = _path(digest)
    if _sha256(tar, path) != path.removeprefix(_BLOBS):
        raise _Wrong(f"{path} is damaged")
    return path


def _path(digest: str) -> str:
    kind, _, value = digest.partition(":")
    if kind != "sha256":
        raise _Wrong(f"digests of kind {kind!a}; sha256 alone is known")
    return _BLOBS + value


def _sha256(tar: tarfile.TarFile, name: str) -> str:
    stream = tar.extractfile(name)
    if stream is None:
        raise KeyError(f"{name} is no file")
    digest = hashlib.sha256()
    while data := stream.read(1 << 20):
        digest.update(data)
    return digest.hexdigest()


def _json(tar: tarfile.TarFile, name: str) -> Any:
    stream = tar.extractfile(name)
    if stream is None:
        raise KeyError(f"{name} is no file")
    text = stream.read(MAX_JSON_BYTES + 1)
    try:
        return json.loads(text)
    except ValueError as error:
        raise _Wrong(f"{name} is no JSON: {error}") from error
