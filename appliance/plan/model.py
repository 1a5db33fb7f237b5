"""plan.json: for every expert where it lives, per rank. Versioned, readable, diffable, strict.

The planner writes it, the engine obeys it, people read it. Expert lists are written like CPU lists
(`0-96,98`): 15,360 experts stay small enough to mail.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from appliance import durable
from appliance.checkpoint.model import ExpertShape
from appliance.errors import PlanError
from appliance.plan.outlook import Forecast, StreamPrediction
from appliance.plan.strict import Bytes, Strict

SCHEMA_VERSION: Literal[1] = 1
BLOCK_ALIGNMENT_BYTES = 4096
DIGITS = 6  # of an expert's or a CPU's number
Home = Literal["device", "host"]
# The ledger lines that the engine's pools must equal, to the byte.
EXPERTS_IN: dict[Home, tuple[str, ...]] = {
    "device": ("routed experts, resident", "cache slots"),
    "host": ("routed experts, on host",),
}


def format_ids(ids: Iterable[int]) -> str:
    """{0,1,2,5} -> "0-2,5"; nothing -> ""."""
    runs: list[list[int]] = []
    for i in sorted(set(ids)):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@lru_cache(maxsize=8192)
def parse_ids(text: str) -> frozenset[int]:
    """The inverse of format_ids. Raises PlanError on anything else."""
    out: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        if (
            max(len(first), len(last)) > DIGITS
            or not first.isdecimal()
            or (dash and not last.isdecimal())
        ):
            raise PlanError(f"{text!r} is not a list of expert numbers such as 0-96,98")
        stop = int(last) if dash else int(first)
        if stop < int(first):
            raise PlanError(f"{part!r} runs backwards in the expert list {text!r}")
        out.update(range(int(first), stop + 1))
    return frozenset(out)


def expert_block_bytes(shape: ExpertShape, tensor_parallel: int) -> int:
    """Bytes of one rank's block [gate | up | down] of trellises, padded to 4 KiB.

    Tensor parallelism splits gate and up along n, down along k: each trellis in equal parts.
    """
    exact = sum(p.trellis_bytes // tensor_parallel for p in shape.projections)
    return -(-exact // BLOCK_ALIGNMENT_BYTES) * BLOCK_ALIGNMENT_BYTES


class LedgerLine(Strict):
    """One line of a rank's byte ledger. `source`: header, formula, measured or setting.

    `pinned`: host memory that a GPU reads in place, locked as long as the engine runs.
    """

    part: str
    home: Home
    size_bytes: Bytes
    source: Literal["header", "formula", "measured", "setting"]
    note: str | None = None
    pinned: bool = False


class LayerPlacement(Strict):
    """Homes of this rank's experts of one layer, and the layer's spare cache slots.

    `in_slots`: the host experts that the slots hold at the start, hottest first to be filled.
    """

    layer: int
    device: str
    host: str
    cache_slots: Annotated[int, Field(ge=0)] = 0
    in_slots: str = ""

    @property
    def device_experts(self) -> frozenset[int]:
        return parse_ids(self.device)

    @property
    def host_experts(self) -> frozenset[int]:
        return parse_ids(self.host)

    @property
    def slot_experts(self) -> frozenset[int]:
        return parse_ids(self.in_slots)


class RankPlan(Strict):
    """One rank: its GPU (None on the CPU engine), its memory node, its bytes and its experts."""

    rank: int
    device: Literal["cuda", "cpu"]
    gpu: str | None = None
    gpu_name: str | None = None
    compute_capability: str | None = None
    numa_node: int | None = None
    cpus: str | None = None
    link: Literal["pcie", "c2c", "nvlink", "memory"] = "pcie"
    link_bytes_per_second: Annotated[float, Field(gt=0)] | None = None
    device_capacity_bytes: Bytes
    ledger: tuple[LedgerLine, ...]
    layers: tuple[LayerPlacement, ...]

    def sizes_by_part(self) -> Counter[str]:
        """Bytes of each part of the ledger, 0 of those that it does not have."""
        sizes: Counter[str] = Counter()
        for line in self.ledger:
            sizes[line.part] += line.size_bytes
        return sizes

    def total_bytes(self, home: Home) -> int:
        return sum(line.size_bytes for line in self.ledger if line.home == home)


class MadeFrom(Strict):
    """sha256 of the inputs, hexadecimal; equal inputs give an equal plan, byte for byte."""

    host: str
    checkpoint: str
    heat: str | None = None
    policy: str
    curve: str | None = None


class Serving(Strict):
    """What the plan is for. The engine is started with these values."""

    streams: Annotated[int, Field(ge=1)]
    context_tokens: Annotated[int, Field(ge=1)]
    prefill_chunk_tokens: Annotated[int, Field(ge=1)]
    kv_cache_bytes: Bytes
    kv_bytes_per_token: Bytes | None = None
    kv_block_tokens: Annotated[int, Field(ge=1)] | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"


class CacheRules(Strict):
    """How the slots follow the traffic; defaults measured in docs/measurements/slot-policy.md.

    half_life_rows       routed rows after which a pick counts half
    hysteresis           how many times hotter the newcomer must be than what it evicts
    deviations           and by how many standard deviations of the two counts
    promotions_per_row   copies over the link that one routed row pays for, over all layers
    burst_rows           rows whose unspent promotions are kept
    pooled               layers with blocks of one size share their slots; else each keeps its own
    promised_cold_share  share of picks that the plan expects on the host: no worse, no swaps
    """

    half_life_rows: Annotated[float, Field(gt=0)] = 350.0
    hysteresis: Annotated[float, Field(ge=1)] = 1.25
    deviations: Annotated[float, Field(ge=0)] = 1.0
    promotions_per_row: Annotated[float, Field(ge=0, le=1e6)] = 2.0
    burst_rows: Annotated[float, Field(ge=0, le=1e6)] = 64.0
    pooled: bool = True
    promised_cold_share: Annotated[float, Field(ge=0, le=1)] = 0.0


class ModelFacts(Strict):
    """Enough of the checkpoint to read the plan without it."""

    family: str
    hidden_size: int
    intermediate_size: int
    layers: int
    experts: int
    top_k: int
    expert_bytes: Bytes
    size_bytes: Bytes


class Plan(Strict):
    """The contract between control plane and engine."""

    schema_version: Literal[1] = SCHEMA_VERSION
    made_from: MadeFrom
    model: ModelFacts
    tensor_parallel: Annotated[int, Field(ge=1)]
    expert_parallel: bool = False
    serving: Serving
    cache: CacheRules | None = None
    ranks: tuple[RankPlan, ...]
    predictions: tuple[StreamPrediction, ...] = ()
    forecast: Forecast | None = None
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Deterministic text: the same plan is the same bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Aside, synced, renamed: a reader sees the old plan or the new one."""
        durable.write_file(path, self.to_json().encode())


def load_plan(path: Path) -> Plan:
    """Read plan.json. Raises PlanError with one sentence for whatever is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}",
                        fix="appliance plan make --model DIR writes one") from error  # fmt: skip
    except UnicodeDecodeError as error:
        raise PlanError(f"the plan {path} is not UTF-8 text", fix="make it again") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = (
            str(error)  # with line and column
            if isinstance(error, json.JSONDecodeError)
            else "it holds what no plan does"  # thousands of digits, thousands of brackets
        )
        raise PlanError(f"the plan {path} is not JSON: {what}", fix="make it again") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"the plan {path} has schema version {version!r}; this release reads {SCHEMA_VERSION}",
            fix="make the plan again with this release",
        )
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        raise PlanError(f"the plan {path}: {_first_problem(error)}", fix="make it again") from error


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        return f"{where}: {first['msg']}"
    names = {name for model in _models(Strict) for name in model.model_fields}
    close = difflib.get_close_matches(str(first["loc"][-1]), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{where} is not a key of a plan{hint}"


def _models(parent: type[Strict]) -> Iterator[type[Strict]]:
    for model in parent.__subclasses__():
        yield model
        yield from _models(model)
