"""weights pull, verify, serve: bytes that come, are proved, and go on to the next box."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance import render
from appliance.cli import options
from appliance.cli.signing import trusted
from appliance.cli.store import Release, StoreDir, existing, store_folder
from appliance.errors import CheckFailed, UsageError
from appliance.settings import read_network, read_settings

if TYPE_CHECKING:
    from appliance.checkpoint.model import Checkpoint
    from appliance.weights.fetch import Moment, Transfer
    from appliance.weights.source import Source
    from appliance.weights.store import Store
    from appliance.weights.verify import BadChunk, Verdict

Rate = Annotated[
    str | None, typer.Option("--rate", help="At most so much a second.", metavar="BYTES")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def register(group: typer.Typer) -> None:
    for command in (pull, verify, serve):
        group.command()(command)


def pull(
    source: Annotated[
        str,
        typer.Argument(
            help="hf:ORG/NAME[@REVISION], https://..., http://..., s3://BUCKET/PREFIX or a folder."
        ),
    ],
    store: StoreDir = None,
    connections: Annotated[int, typer.Option(help="Ranges fetched at once.", min=1)] = 8,
    rate: Rate = None,
    manifest: Annotated[
        Path | None,
        typer.Option(help="Hold the bytes against this manifest, signed or not.", metavar="FILE"),
    ] = None,
    activate: Annotated[bool, typer.Option("--activate", help="Make it current after.")] = False,
    quiet: Quiet = False,
    json: options.Json = False,
) -> None:
    """Fetch a model, prove every byte, make it a release. Interrupted: run it again, it goes on."""
    from appliance.weights.activate import activate as switch
    from appliance.weights.pull import pull as fetch
    from appliance.weights.store import make_store

    where = make_store(store_folder(store), trusted())
    progress = render.ByteProgress(f"pulling {source}", quiet=quiet, json=json)
    said = [""]

    def told(text: str) -> None:
        if not (quiet or json):
            render.say(f"  {text}")

    def observe(now: Moment) -> None:
        if now.trouble not in (None, said[-1]) and not (quiet or json):
            said.append(str(now.trouble))
            render.say(f"  trying again: {now.trouble}")
        progress.update(now.done_bytes, now.total_bytes, now.fetched_bytes, now.files)

    def look(checkpoint: Checkpoint) -> None:
        if not quiet:
            say_whether_it_fits(checkpoint)

    if not (quiet or json):
        render.say(f"asking {source}; what comes goes to {where.folder}")
    how = transfer(connections, rate, told)
    pulled = fetch(where, opened(source, manifest), how, observe, look)
    progress.end()
    render.say(
        f"{render.size(pulled.fetched_bytes)} fetched and {render.size(pulled.reused_bytes)} "
        f"reused in {render.duration(pulled.seconds)}"
    )
    if activate:
        switch(where, pulled.release)
    if json:
        found = {"release": pulled.release, "fetched_bytes": pulled.fetched_bytes}
        render.as_json({**found, "folder": where.release_folder(pulled.release)})
        return
    if not quiet:
        folder = where.pointer if activate else where.release_folder(pulled.release)
        render.say(f"serve it: appliance up --model {folder}")
    render.data(pulled.release)


def verify(
    release: Release = None,
    store: StoreDir = None,
    every: Annotated[bool, typer.Option("--all", help="Every release.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Read every byte, not only files written to since.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Fetch wrong chunks again, those alone.")
    ] = False,
    source: Annotated[
        str | None, typer.Option("--from", help="Repair from here (default: where it came from).")
    ] = None,
    rate: Rate = None,
    quiet: Quiet = False,
    json: options.Json = False,
) -> None:
    """Hold the bytes against the manifest, offline. Exit 3 where they differ."""
    from appliance.weights.repair import repair as mend
    from appliance.weights.verify import Reading
    from appliance.weights.verify import verify as check

    where = existing(store)
    releases = where.releases() if every else [where.find(release)]
    # A scrub with a rate runs beside an engine and must not push its files out of memory.
    reading = Reading(full=full, bytes_per_second=bytes_of(rate), leave_cache=rate is not None)
    progress = render.ByteProgress("verifying", quiet=quiet, json=json)
    verdict = check(
        where, releases, reading, lambda done, total: progress.update(done, total, done)
    )
    progress.end()
    if repair and verdict.bad:
        mended = sum(
            mend(
                where, opened(source or came_from(where, name)), bad, transfer(8, None, render.say)
            )
            for name, bad in by_release(verdict).items()
        )
        render.say(
            f"fetched {render.counted(len(verdict.bad), 'chunk')} again, {render.size(mended)}"
        )
        verdict = check(where, releases, Reading(), lambda done, total: None)
    say_verdict(verdict, releases, json)


def serve(
    store: StoreDir = None,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind.", min=1, max=65535)] = 8090,
) -> None:
    """Be the mirror that the next box pulls from: http://HOST:PORT/current, or /releases/ID.

    With APPLIANCE_WEIGHTS_TOKEN_FILE set, only whoever sends that token is served. Plain HTTP: put
    a TLS proxy before it where the network is not yours.
    """
    from appliance.weights.peer import PeerServer

    where = existing(store)
    network = read_network(read_settings())
    with PeerServer(where, (host, port), network.mirror_token) as server:
        asked = "with a token" if network.mirror_token else "without a token"
        held = render.counted(len(where.releases()), "release")
        render.say(f"serving {held} at http://{host}:{port}, {asked}")
        server.serve_forever()


def say_whether_it_fits(checkpoint: Checkpoint) -> None:
    """The verdict of `size` on this machine; a box that only hands weights on need not serve."""
    from appliance.plan.sizing import Load
    from appliance.plan.sizing_report import lines_here

    experts, size = checkpoint.expert_count, render.size(checkpoint.size_bytes)
    render.say(f"{checkpoint.family}: {experts:,} routed experts, {size}; on this machine:")
    for line in lines_here(checkpoint, options.machine(None), Load()):
        render.say(f"  {line}")


def say_verdict(verdict: Verdict, releases: list[str], json: bool) -> None:
    """What verify found, on stdout; raises CheckFailed where something is wrong."""
    sentences = [*verdict.problems, *(f"{bad.release}: {bad.text}" for bad in verdict.bad)]
    if json:
        found = {"right": verdict.is_right, "read_bytes": verdict.read_bytes}
        render.as_json({**found, "skipped_bytes": verdict.skipped_bytes, "wrong": sentences})
    else:
        render.lines(sentences)
    if not verdict.marks_saved:
        render.say("the store cannot be written: the next run reads the same again")
    if not verdict.is_right:
        raise CheckFailed(
            f"wrong: {render.counted(len(sentences), 'thing')}",
            fix="appliance weights verify --repair fetches wrong chunks; pull fetches lost files",
        )
    render.say(
        f"right: {render.counted(len(releases), 'release')}, "
        f"{render.size(verdict.read_bytes)} read, "
        f"{render.size(verdict.skipped_bytes)} not written to since they were proved"
    )


def by_release(verdict: Verdict) -> dict[str, list[BadChunk]]:
    found: dict[str, list[BadChunk]] = {}
    for bad in verdict.bad:
        found.setdefault(bad.release, []).append(bad)
    return found


def came_from(where: Store, release: str) -> str:
    source = where.manifest(release).source
    if source is None:
        raise UsageError(f"{release} does not say where it came from", fix="--from SOURCE")
    return source


def opened(source: str, manifest: Path | None = None) -> Source:
    from appliance.weights.held import HeldSource
    from appliance.weights.manifest import read_manifest
    from appliance.weights.source import open_source

    found = open_source(source, read_network(read_settings()))
    return found if manifest is None else HeldSource(found, read_manifest(manifest))


def transfer(connections: int, rate: str | None, told: Callable[[str], None]) -> Transfer:
    from appliance.weights.fetch import Transfer

    return Transfer(connections=connections, bytes_per_second=bytes_of(rate), told=told)


def bytes_of(text: str | None) -> int | None:
    """`500M` -> 524288000; K, M, G and T count in 1024."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?(?:/s)?", text.strip().lower())
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size <= 0:
        raise UsageError(f"{text!a} is no number of bytes", fix="for example 500M or 2G")
    return size
