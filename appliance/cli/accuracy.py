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

    from appliance.accuracy.run import Pinned, Server, run_task, sampling
    from appliance.accuracy.tasks import read_task
    from appliance.cli.measured import find

    frozen = read_task(task, count=count, seed=seed, expected_sha256=sha256)
    items = render.counted(len(frozen.items), "item")
    render.say(
        f"{items} of {frozen.name} (sha256 {frozen.sha256[:16]}): "
        f"{what_shows(len(frozen.items), discordant)}"
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
    with render.Progress(f"asking {items}") as progress:
        scores = run_task(out, frozen, pinned, server, sys.executable, streams, progress.advance)
    render.data(f"{sum(scores.values()) / len(scores):.3f}")


def what_shows(items: int, discordant: str) -> str:
    """What so many items can show of a difference, and of none."""
    from appliance.accuracy.intervals import paired_interval
    from appliance.accuracy.power import items_for_effect, smallest_effect

    effect = smallest_effect(items, share(discordant))
    if effect is None:
        needed = items_for_effect(share(discordant))
        seen = f"too few to show any difference if {discordant} of the items differ ({needed} do)"
    else:
        seen = f"a difference of {effect:.3f} shows in 4 of 5 cases if {discordant} of them differ"
    return f"{seen}; equal answers leave a loss of {-paired_interval(0, 0, items)[0]:.1%} possible"


@group.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Run before, or the reference.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Run after, or what is judged.")],
    margin: Annotated[
        str | None, typer.Option(metavar="SHARE", help="B may be worse by less than this.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> int:
    """B minus A, item by item. With --margin: exit code 3 unless B is shown to be not inferior."""
    from dataclasses import asdict

    from appliance.accuracy.paired import compare as compared
    from appliance.accuracy.power import least_items
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
    needed = least_items(share(margin))
    if not good and found.groups < needed:
        few = render.counted(found.groups, "item" if found.groups == found.items else "group")
        render.say(f"  {few} cannot show that: even equal answers take {needed} or more")
    return 0 if good else 3
