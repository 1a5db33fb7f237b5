"""weights bundle create, import: across an air gap."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance import render
from appliance.cli.signing import trusted
from appliance.cli.store import StoreDir, existing, store_folder
from appliance.cli.transfers import Quiet, bytes_of, transfer

group = typer.Typer(
    help="Carry a release, images, chart and documents into a closed network.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@group.command()
def create(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="An empty folder.")],
    release: Annotated[str | None, typer.Option(help="Default: the current one.")] = None,
    store: StoreDir = None,
    add: Annotated[
        list[Path] | None,
        typer.Option(help="A file or folder besides: image archive, chart, documents."),
    ] = None,
    image: Annotated[
        list[str] | None, typer.Option(help="An image's digest.", metavar="NAME@sha256:DIGEST")
    ] = None,
    part_size: Annotated[str, typer.Option(help="Bytes of a part; 4G-1 fits FAT32.")] = "4000M",
    quiet: Quiet = False,
) -> None:
    """Write a release and what belongs to it in parts. Interrupted: run it again, it goes on."""
    from appliance.weights.bundle import image_digests
    from appliance.weights.bundle_write import create_bundle

    where = existing(store)
    progress = render.ByteProgress(f"writing {folder}", quiet=quiet)
    bundle = create_bundle(
        where,
        where.find(release),
        folder,
        extras=add or [],
        images=image_digests(image or []),
        part_bytes=bytes_of(part_size) or 0,
        observe=lambda done, total: progress.update(done, total, done),
    )
    progress.end()
    render.say(f"{len(bundle.parts)} parts, {render.size(bundle.stream_bytes)}")
    render.data(str(folder))


@group.command(name="import")
def import_(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Where the parts are.")],
    store: StoreDir = None,
    extras: Annotated[
        Path | None, typer.Option(help="Where to put what is beside the weights.", metavar="DIR")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Prove and install a bundle, without any network. Media may be connected one by one."""
    from appliance.weights.bundle import BundleSource, install_extras
    from appliance.weights.pull import pull
    from appliance.weights.store import make_store

    source = BundleSource(folders)
    where = make_store(store_folder(store), trusted())
    progress = render.ByteProgress("importing", quiet=quiet)
    pulled = pull(
        where,
        source,
        transfer(2, None),
        lambda now: progress.update(now.done_bytes, now.total_bytes, now.fetched_bytes, now.files),
    )
    progress.end()
    if extras is not None:
        for path in install_extras(source, extras):
            render.say(f"wrote {path}")
    for name, digest in source.bundle.images.items():
        render.say(f"image {name}@{digest}")
    render.data(pulled.release)
