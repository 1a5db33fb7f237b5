"""weights ls, manifest, activate, rollback, history, du, rm, gc: the releases of a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.cli.signing import sign, trusted
from appliance.settings import read_settings

if TYPE_CHECKING:
    from appliance.weights.activate import Activation
    from appliance.weights.store import Store

StoreDir = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help="The store (default: APPLIANCE_WEIGHTS_DIR, else weights in the state directory).",
        metavar="DIR",
    ),
]
Release = Annotated[
    str | None, typer.Argument(metavar="[RELEASE]", help="A release, or the start of its id.")
]


def register(group: typer.Typer) -> None:
    for command in (ls, manifest, activate, rollback, history, du, rm, gc, repack, sign):
        group.command()(command)


def ls(store: StoreDir = None, json: options.Json = False) -> None:
    """Every release: `*` is the current one, `-` the previous."""
    from appliance.weights.activate import previous

    where = existing(store)
    current = where.current()
    before = previous(where) if current is not None else None
    marks = {current: "*", before: "-"}
    releases = {release: where.manifest(release) for release in where.releases()}
    if json:
        return render.as_json(
            [
                {"release": name, "mark": marks.get(name, ""), "size_bytes": found.size_bytes}
                | {"revision": found.revision, "source": found.source}
                for name, found in releases.items()
            ]
        )
    if not releases:
        render.say(f"{where.folder} holds no release")
    for name, found in releases.items():
        files = render.counted(len(found.files), "file")
        text = f"{render.size(found.size_bytes)}  {files}  {found.source or ''}"
        render.data(f"{marks.get(name, ' ')} {name}  {text}")
    return None


def manifest(
    release: Release = None,
    store: StoreDir = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--of", help="Of the files in this folder: put there, it makes a mirror.", metavar="DIR"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model's name, ORG/NAME, with --of (default: the folder's)."),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="The revision that the manifest names, with --of.")
    ] = None,
    licence: Annotated[
        str | None, typer.Option(help="The licence that the manifest names, with --of.")
    ] = None,
) -> None:
    """The manifest of a release: every file with its sha256, whole and by chunk."""
    from appliance.weights.describe import describe
    from appliance.weights.folder import FolderSource

    if folder is None:
        where = existing(store)
        return render.piece(where.manifest(where.find(release)).to_json().decode())
    progress = render.ByteProgress(f"hashing {folder}")
    made = describe(
        FolderSource(folder),
        model=model or folder.absolute().name,
        revision=revision,
        licence=licence,
        observe=lambda done, total: progress.update(done, total, done),
    )
    progress.end()
    return render.piece(made.to_json().decode())


def activate(
    release: Annotated[str, typer.Argument(metavar="RELEASE", help="Or the start of its id.")],
    store: StoreDir = None,
    force: Annotated[
        bool, typer.Option("--force", help="Even while an engine has the old release open.")
    ] = False,
) -> None:
    """Make a release current, in one step. It must be complete and proved."""
    from appliance.weights.activate import activate as switch

    where = existing(store)
    chosen = where.find(release)
    say_switch(switch(where, chosen, in_use_is_fine=force))


def rollback(
    store: StoreDir = None,
    force: Annotated[
        bool, typer.Option("--force", help="Even while an engine has the current release open.")
    ] = False,
) -> None:
    """Make the previous release current again."""
    from appliance.weights.activate import rollback as back

    say_switch(back(existing(store), in_use_is_fine=force))


def history(store: StoreDir = None, json: options.Json = False) -> None:
    """Every activation, oldest first."""
    import time

    from appliance.weights.activate import read_history

    switches = read_history(existing(store))
    if json:
        return render.as_json([switch.model_dump() for switch in switches])
    for switch in switches:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(switch.time))
        render.data(f"{when}  {switch.old or '(none)'} -> {switch.new}")
    return None


def du(store: StoreDir = None, json: options.Json = False) -> None:
    """Bytes on the disk: of each release, alone and shared, and what gc would free."""
    from appliance.weights.sweep import usage

    uses, orphans, staged = usage(existing(store))
    if json:
        found = [
            {"release": u.release, "bytes": u.size_bytes, "alone": u.alone_bytes} for u in uses
        ]
        return render.as_json({"releases": found, "orphans": orphans, "staged": staged})
    rows = [
        (use.release, f"{render.size(use.size_bytes)}, {render.size(use.alone_bytes)} of it alone")
        for use in uses
    ]
    rows += [("in no release", render.size(orphans)), ("staged", render.size(staged))]
    return render.table(rows)


def rm(
    release: Annotated[str, typer.Argument(metavar="RELEASE", help="Or the start of its id.")],
    store: StoreDir = None,
) -> None:
    """Remove one release and the files that only it has."""
    from appliance.weights.sweep import rm as remove

    where = existing(store)
    swept = remove(where, where.find(release))
    render.say(f"removed {', '.join(swept.releases)}: {render.size(swept.freed_bytes)} freed")


def gc(
    store: StoreDir = None,
    keep: Annotated[list[str] | None, typer.Option(help="Keep this release too.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove every release but the current and the previous, and what interrupted pulls left."""
    from appliance.weights.sweep import gc as sweep

    where = existing(store)
    swept = sweep(where, keep=[where.find(name) for name in keep or ()], dry_run=dry_run)
    for release in swept.releases:
        render.say(f"{'would remove' if dry_run else 'removed'} {release}")
    render.say(
        f"{render.counted(swept.blobs, 'file')} and {swept.staged} staged, "
        f"{render.size(swept.freed_bytes)} {'would be freed' if dry_run else 'freed'}"
    )


def repack(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write arena files.")],
    release: Annotated[str | None, typer.Option(help="Default: the current one.")] = None,
    store: StoreDir = None,
    parts: Annotated[int, typer.Option(help="Ranks that share each expert.", min=1)] = 1,
) -> None:
    """Write the routed experts in the order and alignment in which they are loaded."""
    from appliance.checkpoint.exl3 import read_checkpoint
    from appliance.weights.repack import repack as write

    where = existing(store)
    checkpoint = read_checkpoint(where.release_folder(where.find(release)))
    progress = render.ByteProgress(f"writing {folder}")
    made = write(checkpoint, folder, parts, lambda done, total: progress.update(done, total, done))
    progress.end()
    render.lines(str(arena.path) for arena in made)


def say_switch(done: Activation) -> None:
    render.say(f"current was {done.old or 'nothing'}, is {done.new}")
    if done.unseen:
        hidden = render.counted(done.unseen, "process", "processes")
        # Root is refused, too, where a container or ptrace's scope hides a process.
        render.say(f"warning: {hidden} could not be looked into: the old release may be open there")
    render.data(done.new)


def store_folder(chosen: Path | None) -> Path:
    settings = read_settings()
    return chosen or settings.weights_dir or settings.state_dir / "weights"


def existing(chosen: Path | None) -> Store:
    from appliance.weights.store import open_store

    return open_store(store_folder(chosen), trusted())
