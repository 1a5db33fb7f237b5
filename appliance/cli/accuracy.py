"""accuracy run, compare: whether the answers are still right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance import render
from appliance.cli.seating import share

group = typer.Typer(
    help="Whether the answers are still right.", no_args_is_help=True, rich_markup_mode=None
)
RunPath = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")]


@group.command()
def run(
    task: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="GSM8K, HumanEval, or {id, prompt, answer}."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the run.")],
    count: Annotated[int, typer.Option(min=2, help="Items of the frozen subset.")] = 150,
    seed: Annotated[int, typer.Option(help="Another subset for another number.")] = 1,
    sha256: Annotated[str | None, typer.Option(help="The file must have this checksum.")] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="Another OpenAI-compatible server, up to /v1.", metavar="URL"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name there.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="File with its API key.")] = None,
    streams: Annotated[int, typer.Option(min=1, help="Questions at once.")] = 4,
    effort: Annotated[
        str | None, typer.Option(help="reasoning_effort of every request, where it has one.")
    ] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Keep the 20 likeliest tokens at each position.")
    ] = False,
    discordant: Annotated[
        str, typer.Option(metavar="SHARE", help="Items on which two systems may differ.")
    ] = "8%",
) -> None:
    """Ask a frozen subset of a task, score each item; run again to continue."""
    import sys

    from appliance.accuracy.paired import smallest_effect
    from appliance.accuracy.run import Pinned, Server, run_task, sampling
    from appliance.accuracy.tasks import read_task
    from appliance.cli.measured import find

    frozen = read_task(task, count=count, seed=seed, expected_sha256=sha256)
    effect = smallest_effect(len(frozen.items), share(discordant))
    render.say(
        f"{render.counted(len(frozen.items), 'item')} of {frozen.name} "
        f"(sha256 {frozen.sha256[:16]}): a difference of {effect:.3f} shows in "
        f"4 of 5 cases if {discordant} of the items differ"
    )
    found = find(url, model, key_file, ignore_eos=False)
    pinned = Pinned.of(
        frozen,
        found.endpoint.model,
        sampling(effort, logprobs=logprobs),
        plan_digest=found.plan_digest,
        weights_digest=found.weights_digest,
        chat_template_sha256=found.chat_template_sha256,
    )
    server = Server(found.endpoint.url, found.endpoint.key, tls=found.endpoint.tls)
    with render.Progress(f"asking {render.counted(len(frozen.items), 'item')}") as progress:
        scores = run_task(out, frozen, pinned, server, sys.executable, streams, progress.advance)
    render.data(f"{sum(scores.values()) / len(scores):.3f}")


@group.command()
def compare(
    a: RunPath,
    b: RunPath,
    margin: Annotated[
        str | None, typer.Option(metavar="SHARE", help="B may be worse by less than this.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> int:
    """B minus A, item by item. With --margin: exit code 3 unless B is shown to be not inferior."""
    from dataclasses import asdict

    from appliance.accuracy.paired import compare as compared
    from appliance.accuracy.run import read_run, read_tokens, same_items
    from appliance.accuracy.tokens import compare_tokens, token_lines

    (pinned_a, scores_a), (pinned_b, scores_b) = read_run(a), read_run(b)
    found = compared(scores_a, scores_b, same_items(pinned_a, pinned_b))
    tokens = compare_tokens(read_tokens(a), read_tokens(b))
    if json:
        level = None if tokens is None else asdict(tokens)
        render.as_json({**asdict(found), "tokens": level})
    else:
        low, high = found.interval
        exact = "" if found.p_value is None else f", McNemar p = {found.p_value:.3f}"
        render.data(
            f"{found.a:.3f} -> {found.b:.3f}: {found.difference:+.3f} [{low:+.3f}, {high:+.3f}] "
            f"over {render.counted(found.items, 'item')}; only A right {found.only_a}, "
            f"only B {found.only_b}{exact}"
        )
        if tokens is not None:
            render.lines(token_lines(tokens))
    if margin is None:
        return 0
    good = found.not_inferior(share(margin))
    render.say(f"{'not inferior' if good else 'not shown to be not inferior'} by {margin}")
    return 0 if good else 3
