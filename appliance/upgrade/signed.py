"""Signatures of images: minisign's over the image's digest, by a key that the operator trusts.

What is signed is the text of `statement`, so that minisign alone makes one:
`minisign -S -m FILE`, with that text in FILE.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from appliance.errors import CheckFailed
from appliance.weights.signature import read_keys


def statement(digest: str) -> bytes:
    return f"moe-appliance image 1\n{digest}\n".encode()


def require_signature(digest: str, signature: str | None, keys_file: Path) -> None:
    """Raises CheckFailed unless a key in `keys_file` signed this digest."""
    keys = read_keys(keys_file)
    if signature is None:
        raise CheckFailed(
            f"the image {digest} is not signed, and a signature by a key in {keys_file} is asked"
            " for",
            fix="give --signature FILE; unset APPLIANCE_IMAGE_PUBLIC_KEY to trust the digest alone",
        )
    library = import_module("minisign")
    try:
        read = library.Signature.from_bytes(signature.encode())
    except ValueError as error:
        raise CheckFailed(f"the image's signature is none of minisign's: {error}") from error
    for key in keys.keys:
        try:
            key.verify(statement(digest), read)
        except library.VerifyError:
            continue
        return
    raise CheckFailed(
        f"none of the {len(keys.keys)} keys in {keys_file} signed the image {digest}",
        fix="do not use it; ask who published it",
    )
