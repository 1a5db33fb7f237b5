"""Options that several commands take, and what they become."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from appliance import render
from appliance.plan.request import Policy
from appliance.settings import read_settings

if TYPE_CHECKING:
    from appliance.plan.routing import Heat
    from appliance.settings import Settings
    from preflight import Host
    from preflight.answers import Source

Model = Annotated[Path | None, typer.Option(help="Folder of an EXL3 checkpoint.", metavar="DIR")]
At = Annotated[
    str | None,
    typer.Option(
        help="compose, compose:SERVICE or kubernetes:NAMESPACE/RELEASE; default: this host's own.",
        metavar="WHERE",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
TensorParallel = Annotated[
    int | None, typer.Option(help="Ranks to split over (default: every GPU).", metavar="N")
]
ExpertParallel = Annotated[
    bool,
    typer.Option(
        "--expert-parallel",
        help="Whole experts per rank, not slices of all; slower where slices are possible.",
    ),
]
Device = Annotated[
    Literal["cuda", "cpu"] | None,
    typer.Option(help="Plan for GPUs or without (default: GPUs where there are any)."),
]
DeviceMemory = Annotated[
    str | None, typer.Option(help="Use this much of each device: 80GiB.", metavar="SIZE")
]
Streams = Annotated[
    int | None, typer.Option(help="Requests that decode at once (default 6).", metavar="N")
]
Context = Annotated[
    int | None, typer.Option(help="Longest conversation in tokens.", metavar="TOKENS")
]
Conversations = Annotated[
    int | None,
    typer.Option(help="Contexts the KV cache keeps (default: twice the streams).", metavar="N"),
]
KvDtype = Annotated[
    Literal["auto", "fp8"] | None,
    typer.Option(help="Values of the KV cache (default: auto); fp8 takes half of 16 bits."),
]
CacheSlots = Annotated[
    int | None,
    typer.Option(help="Slots a layer that follow the traffic (default: chosen).", metavar="N"),
]
HostShare = Annotated[
    float | None,
    typer.Option(
        help="Share of the experts to keep on the host, 0 to 1 (default: what does not fit)."
    ),
]
Ignore = Annotated[
    list[str] | None, typer.Option(help="A failure of this check only warns.", metavar="ID")
]
Recorded = Annotated[
    Path | None, typer.Option("--host", help="A recorded machine instead.", metavar="DIR")
]
Root = Annotated[
    Path | None,
    typer.Option(
        help="Where the host's /proc and /sys are mounted (APPLIANCE_HOST_ROOT).", metavar="DIR"
    ),
]
HeatFiles = Annotated[
    list[Path] | None,
    typer.Option("--heat", help="Routing counts or traces to rank experts by.", metavar="FILE"),
]


POLICY_FIELDS = frozenset(field.name for field in dataclasses.fields(Policy))


def policy(**wishes: Any) -> Policy:
    """The planner's request; what is None is left to the planner's default."""
    return Policy(**{name: value for name, value in wishes.items() if value is not None})


def asked_by(settings: Settings) -> Policy:
    """What the settings alone ask of the planner."""
    return policy(
        device=settings.device,
        tensor_parallel=settings.tensor_parallel,
        streams=settings.streams,
        context_tokens=settings.context_tokens,
        host_share=settings.host_share,
    )


def _asked(
    device: Device = None,
    device_memory: DeviceMemory = None,
    tensor_parallel: TensorParallel = None,
    expert_parallel: ExpertParallel = False,
    streams: Streams = None,
    conversations: Conversations = None,
    context: Context = None,
    kv_dtype: KvDtype = None,
    host_share: HostShare = None,
    cache_slots: CacheSlots = None,
) -> Policy:
    """What is asked of the planner: one table for every command that plans.

    What the command line does not say, the settings do, as in a container.
    """
    from appliance.plan.sizing import bytes_from

    settings = read_settings()
    said = {
        "device": device,
        "tensor_parallel": tensor_parallel,
        "streams": streams,
        "context_tokens": context,
        "host_share": host_share,
    }
    settled = {k: getattr(settings, k) if value is None else value for k, value in said.items()}
    return policy(
        device_capacity_bytes=None if device_memory is None else bytes_from(device_memory),
        expert_parallel=expert_parallel,
        conversations=conversations,
        kv_dtype=kv_dtype,
        cache_slots=cache_slots,
        **settled,
    )


def said(context: typer.Context) -> frozenset[str]:
    """The fields of a policy that an option of this command line speaks of."""
    named = {"context": "context_tokens", "device_memory": "device_capacity_bytes"}
    given = {name for name in context.params if _on_the_line(context, name)}
    return POLICY_FIELDS & {named.get(name, name) for name in given}


def _on_the_line(context: typer.Context, name: str) -> bool:
    found = context.get_parameter_source(name)
    return found is not None and found.name != "DEFAULT"


def takes_policy(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """A command whose parameter `policy` becomes the options of `_asked`, in its place.

    One that serves a plan there is, by its parameter `plan`, refuses wishes for another.
    """
    table = inspect.signature(_asked, eval_str=True).parameters
    parameters: list[inspect.Parameter] = []
    for name, own in inspect.signature(command, eval_str=True).parameters.items():
        parameters += table.values() if name == "policy" else [own]

    @functools.wraps(command)
    def run(**given: Any) -> int | None:
        wishes = {name: given.pop(name) for name in table}
        if "plan" in given:
            said = [name for name, option in table.items() if wishes[name] != option.default]
            _refuse_wishes([*said, *(["heat"] if given["heat"] else [])], given["plan"])
        return command(policy=_asked(**wishes), **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _refuse_wishes(names: list[str], plan: Path | None) -> None:
    """A plan that is given says all of this already, and would be obeyed without a word."""
    from appliance.errors import UsageError

    settled = read_settings().plan
    if not names or (plan is None and settled is None):
        return
    asked = ", ".join(f"--{name.replace('_', '-')}" for name in names)
    given = f"APPLIANCE_PLAN is {settled}" if plan is None else f"--plan {plan} is given"
    raise UsageError(
        f"{given}, and {asked} would make another plan",
        fix=f"leave out {asked}, or the plan; or make one with them: appliance plan make",
    )


def heat(files: list[Path] | None) -> Heat | None:
    """Counts of any known format, added up; what had to be said about them is said."""
    from appliance.plan.heat_files import read_heat

    if not files:
        return None
    found = read_heat(files)
    for note in found.notes:
        render.say(f"note: {note}")
    return found.heat


def source(recorded: Path | None, root: Path | None = None) -> Source:
    """This machine (its /proc and /sys below `root`), or the one recorded in a folder."""
    from appliance.errors import UsageError
    from preflight import Live, Recorded
    from preflight.answers import Unreadable

    if recorded is not None and root is not None:
        raise UsageError("--host is a recording and --root a machine: give one of them")
    if root is not None and not ((root / "proc").is_dir() and (root / "sys").is_dir()):
        raise UsageError(
            f"{root} holds no proc and sys", fix="mount the host's /proc and /sys below it"
        )
    try:
        return Live(root or Path("/")) if recorded is None else Recorded(recorded)
    except Unreadable as error:
        raise UsageError(f"cannot replay a machine: {error}") from error


def machine(recorded: Path | None, record: Path | None = None) -> Host:
    """This machine, or the one recorded in a folder; kept in `record` where that is given."""
    from preflight import Recording, inspect

    asked = source(recorded)
    if record is None:
        return inspect(asked)
    recording = Recording(asked, record)
    host = inspect(recording)
    recording.save()
    return host
