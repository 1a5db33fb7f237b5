"""weights bundle create, import: across an air gap."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from appliance import render
from appliance.cli.signing import trusted
from appliance.cli.store import StoreDir, existing, store_folder
from appliance.cli.transfers import Quiet, bytes_of, transfer
from appliance.settings import inherited_environment

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
    image: Annotated[
        list[str] | None,
        typer.Option(
            help="An image archive, the name of an image that Docker has here, or only a digest.",
            metavar="FILE|NAME|NAME@sha256:DIGEST",
        ),
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="The chart, a folder or a .tgz.", metavar="PATH")
    ] = None,
    docs: Annotated[
        list[Path] | None, typer.Option(help="Documents: a file or folder.", metavar="PATH")
    ] = None,
    add: Annotated[
        list[Path] | None, typer.Option(help="Any other file or folder.", metavar="PATH")
    ] = None,
    part_size: Annotated[str, typer.Option(help="Bytes of a part; 4G-1 fits FAT32.")] = "4000M",
    quiet: Quiet = False,
) -> None:
    """Write a release and what belongs to it in parts. Interrupted: run it again, it goes on."""
    from appliance import durable
    from appliance.weights.bundle_write import create_bundle
    from appliance.weights.collect import collect

    where = existing(store)
    # Docker's archives wait here, so that a run after a kill takes the very same bytes.
    saved = folder.with_name(f".{folder.name}-images")
    durable.make_folder(saved)
    beside = collect(
        images=image or (),
        chart=chart,
        docs=docs or (),
        others=add or (),
        saved=saved,
        environment=inherited_environment(),
    )
    progress = render.ByteProgress(f"writing {folder}", quiet=quiet)
    bundle = create_bundle(
        where,
        where.find(release),
        folder,
        beside=beside,
        part_bytes=bytes_of(part_size) or 0,
        observe=lambda done, total: progress.update(done, total, done),
    )
    progress.end()
    shutil.rmtree(saved)
    render.say(f"{render.counted(len(bundle.parts), 'part')}, {render.size(bundle.stream_bytes)}")
    for name, digest in bundle.images.items():
        render.say(f"image {name}@{digest}")
    if beside.missing:
        render.say(f"not in it: {', '.join(beside.missing)}")
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
        transfer(2, None, render.say),
        lambda now: progress.update(now.done_bytes, now.total_bytes, now.fetched_bytes, now.files),
    )
    progress.end()
    if extras is not None:
        written = install_extras(source, extras)
        render.say(f"wrote {render.counted(len(written), 'file')} to {extras}")
        for path in written:
            if path.is_relative_to(extras / "images"):
                render.say(f"  docker load --input {path}")
    elif source.bundle.extras:
        left = render.counted(len(source.bundle.extras), "file")
        render.say(f"not written: {left} besides (--extras DIR)")
    for name, digest in source.bundle.images.items():
        render.say(f"image {name}@{digest}")
    if source.bundle.chart is not None:
        render.say(f"chart {source.bundle.chart}")
    render.data(pulled.release)
