"""Signatures of manifests: minisign's (Ed25519), so that `minisign -V` can check them by hand.

Signed is the statement: model, revision, licence, and every file with its sha256, whole and by
chunk, as one canonical text. Not signed is what differs between stores: where it was pulled from,
and the summary, which everybody works out from the files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from appliance.errors import UsageError, WeightsError, with_extra
from appliance.weights.manifest import Manifest

if TYPE_CHECKING:
    import minisign

HEAD = "moe-appliance release 1\n"
MAX_KEY_BYTES = 64 << 10


def statement(manifest: Manifest) -> bytes:
    """What a signature covers: the same bytes for the same release, in every store."""
    said = {
        "model": manifest.model,
        "revision": manifest.revision,
        "licence": manifest.licence,
        "files": [
            {
                "path": file.path,
                "size_bytes": file.size_bytes,
                "sha256": file.sha256,
                "chunks": file.chunks,
            }
            for file in sorted(manifest.files, key=lambda file: file.path)
        ],
    }
    return (HEAD + json.dumps(said, indent=1, sort_keys=True) + "\n").encode()


@dataclass(frozen=True)
class Keys:
    """The public keys of one file; whatever one of them signed is trusted."""

    path: Path
    keys: tuple[minisign.PublicKey, ...]

    def check(self, manifest: Manifest | None, where: str) -> None:
        """Raises WeightsError unless one of these keys signed the manifest. `where` names it."""
        if manifest is None or manifest.signature is None:
            raise WeightsError(
                f"{where} is not signed, and a signature by a key in {self.path} is required",
                fix="pull from a source whose manifest is signed, or have it signed: appliance "
                "weights sign; unset APPLIANCE_WEIGHTS_PUBLIC_KEY to trust the channel instead",
            )
        library = _library()
        try:
            signature = library.Signature.from_bytes(manifest.signature.encode())
        except ValueError as error:
            raise WeightsError(f"{where}: the signature is none of minisign's: {error}") from error
        signed = statement(manifest)
        for key in self.keys:
            try:
                key.verify(signed, signature)
            except library.VerifyError:
                continue
            return
        raise WeightsError(
            f"{where}: the signature is not right: none of the {len(self.keys)} keys in "
            f"{self.path} signed these files",
            fix="do not use it; ask who published it",
        )


def read_keys(path: Path) -> Keys:
    """Public keys as minisign writes them, one file's after another's; comments are skipped.

    Raises UsageError for a file without a key, or without the library that reads it.
    """
    library = _library()
    lines = _read(path, "public key").decode("utf-8", "replace").splitlines()
    texts = [line.strip() for line in lines if not line.startswith(("untrusted comment:", "#"))]
    try:
        keys = tuple(library.PublicKey.from_base64(text) for text in texts if text)
    except ValueError as error:
        raise UsageError(f"{path} holds no public key of minisign: {error}") from error
    if not keys:
        raise UsageError(f"{path} holds no public key")
    return Keys(path, keys)


def sign(manifest: Manifest, key_file: Path, password: str | None) -> Manifest:
    """The manifest with a signature by the secret key in `key_file`, in place of an older one."""
    library = _library()
    try:
        with library.SecretKey.from_bytes(_read(key_file, "secret key")) as key:
            if key.is_encrypted():
                if password is None:
                    raise UsageError(f"{key_file} needs a password", fix="--password-file FILE")
                key.decrypt(password)
            made = key.sign(
                statement(manifest), trusted_comment=f"moe-appliance {manifest.release_id}"
            )
    except ValueError as error:
        raise UsageError(f"cannot sign with {key_file}: {error}") from error
    return manifest.model_copy(update={"signature": bytes(made).decode() + "\n"})


def _read(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the {what} in {path}: {error.strerror}") from error
    if len(content) > MAX_KEY_BYTES:
        raise UsageError(f"{path} has more than {MAX_KEY_BYTES:,} bytes: that is no {what}")
    return content


def _library() -> ModuleType:
    try:
        return import_module("minisign")
    except ImportError as error:
        raise UsageError(
            "signatures need the library py-minisign, which is not installed",
            fix=with_extra("signing"),
        ) from error
