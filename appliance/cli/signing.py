"""weights sign, and the keys that a store trusts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import render
from appliance.errors import UsageError
from appliance.settings import read_settings

if TYPE_CHECKING:
    from appliance.weights.signature import Keys


def trusted() -> Keys | None:
    """The keys of APPLIANCE_WEIGHTS_PUBLIC_KEY; None where none is set: no signature is asked."""
    path = read_settings().weights_public_key
    if path is None:
        return None
    from appliance.weights.signature import read_keys

    return read_keys(path)


def sign(
    release: Annotated[
        str | None, typer.Argument(metavar="[RELEASE]", help="A release, or the start of its id.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="minisign's secret key.", metavar="FILE")] = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", help="The store (default: as of every command).", metavar="DIR"),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--of", help="Instead: the manifest of this published folder.", metavar="DIR"),
    ] = None,
    password_file: Annotated[
        Path | None, typer.Option(help="Holds the key's password, one line.", metavar="FILE")
    ] = None,
    statement: Annotated[
        bool, typer.Option("--statement", help="Only print what is signed, for minisign itself.")
    ] = False,
) -> None:
    """Sign a manifest; the signature travels with it to mirrors, peers and bundles.

    Where APPLIANCE_WEIGHTS_PUBLIC_KEY names a file of public keys, nothing else is pulled.
    """
    from appliance import durable
    from appliance.cli.store import existing
    from appliance.weights import signature
    from appliance.weights.manifest import read_manifest
    from appliance.weights.names import MANIFEST

    if folder is not None:
        path = folder / MANIFEST
    else:
        where = existing(store)
        path = where.release_folder(where.find(release)) / MANIFEST
    manifest = read_manifest(path)
    if statement:
        return render.piece(signature.statement(manifest).decode())
    if key is None:
        raise UsageError("a secret key is needed to sign", fix="--key FILE; minisign -G makes one")
    signed = signature.sign(manifest, key, _password(password_file))
    durable.write_file(path, signed.to_json())
    render.say(f"signed {render.counted(len(signed.files), 'file')} of {signed.release_id}")
    return render.data(signed.release_id)


def _password(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the password in {path}: {error}") from error
