"""What a synthetic checkpoint should look like, refused early where it is impossible."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.checkpoint.synth import kinds
from appliance.errors import UsageError

FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe", "mixtral", "deepseek_v41")
ALL_MOE = ("mixtral", "deepseek_v41")  # families whose every layer has experts
CODEBOOKS = ("3inst", "mcg", "mul1")
TABLE_FORMATS = ("int4", "fp8")
DENSE_FORMATS = ("bf16", "fp8")
ROUTERS = ("drawn", "decided")
WHOLE_BITS = frozenset(range(1, 9))
HALF_BITS = frozenset((1.5, 2.5, 3.5))
BLOCK = 128  # EXL3 transforms inputs and outputs in blocks of 128 (FACTS section 2)
SMALLEST_VOCABULARY = 512  # 256 bytes, the special tokens, and room for words


@dataclass(frozen=True, slots=True)
class SynthSpec:
    """A small mixture-of-experts model; the defaults give about 7 MB, made in about a second.

    Sizes are counts of values. `intermediate_size` is one routed expert's; `dense_layers` layers
    before the first MoE layer have an ordinary MLP of twice `hidden_size`. `bits` is K for (gate,
    up, down) of every routed expert: 1..8, and 1.5, 2.5, 3.5 with the mul1 codebook. `dense_bits`
    is K of attention, dense MLPs and shared experts, `head_bits` of lm_head. `table_format` is how
    the lookup table of a family that has one is stored; both formats hold the same values.
    `dense_format` is that of DeepSeek-V4.1's attention and shared expert. `router`: "drawn" at
    random, where near ties are common, or "decided" by the token, as a trained one is (`kinds`).
    Raises UsageError for a model that EXL3 or the family cannot express.
    """

    family: str = "qwen3_moe"
    layers: int = 4
    dense_layers: int = 1
    hidden_size: int = 256
    intermediate_size: int = 256
    experts: int = 16
    top_k: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    bits: tuple[float, float, float] = (3, 3, 3)
    dense_bits: float = 3
    head_bits: float = 6
    codebook: str = "mcg"
    quantise_head: bool = True
    table_format: str = "int4"
    dense_format: str = "bf16"
    router: str = "drawn"
    vocab_size: int = 1024
    shards: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        _check_words(self)
        _check_counts(self)
        _check_bits(self)
        if self.router == "decided":
            kinds.check(self)


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{what} {value!r} is unknown", fix=f"one of {', '.join(allowed)}")


def _check_words(spec: SynthSpec) -> None:
    _one_of("family", spec.family, FAMILIES)
    _one_of("codebook", spec.codebook, CODEBOOKS)
    _one_of("table_format", spec.table_format, TABLE_FORMATS)
    _one_of("dense_format", spec.dense_format, DENSE_FORMATS)
    _one_of("router", spec.router, ROUTERS)


def _check_counts(spec: SynthSpec) -> None:
    for what in ("layers", "experts", "top_k", "heads", "kv_heads", "head_dim", "shards"):
        if getattr(spec, what) < 1:
            raise UsageError(f"{what} is {getattr(spec, what)} and must be at least 1")
    for what in ("hidden_size", "intermediate_size"):
        value = getattr(spec, what)
        if value < BLOCK or value % BLOCK:
            raise UsageError(
                f"{what} is {value}, and EXL3 needs a multiple of {BLOCK}",
                fix=f"{what} {max(1, round(value / BLOCK)) * BLOCK}",
            )
    if spec.family in ALL_MOE and spec.dense_layers:
        raise UsageError(
            f"dense_layers is {spec.dense_layers}; every layer of a {spec.family} has experts",
            fix="dense_layers 0",
        )
    if not 0 <= spec.dense_layers < spec.layers:
        raise UsageError(
            f"dense_layers is {spec.dense_layers} of {spec.layers} layers",
            fix="at least 0, and one less than layers: a MoE layer must be left",
        )
    if spec.top_k > spec.experts:
        raise UsageError(f"top_k is {spec.top_k}, but a layer has only {spec.experts} experts")
    if spec.heads % spec.kv_heads:
        raise UsageError(
            f"{spec.heads} heads cannot share {spec.kv_heads} kv_heads evenly",
            fix="a number of kv_heads that divides heads",
        )
    if spec.head_dim % 2:
        raise UsageError(f"head_dim is {spec.head_dim}, and rotary embedding needs an even number")
    if spec.vocab_size < SMALLEST_VOCABULARY:
        raise UsageError(
            f"vocab_size is {spec.vocab_size}, too few for 256 bytes and some words",
            fix=f"at least {SMALLEST_VOCABULARY}",
        )


def _check_bits(spec: SynthSpec) -> None:
    for what, value in (
        *zip(("gate bits", "up bits", "down bits"), spec.bits, strict=True),
        ("dense_bits", spec.dense_bits),
        ("head_bits", spec.head_bits),
    ):
        if value in HALF_BITS and spec.codebook != "mul1":
            raise UsageError(
                f"{what} is {value:g}, but codebook {spec.codebook} has whole bits only",
                fix="codebook mul1, or whole bits",
            )
        if value not in WHOLE_BITS | HALF_BITS:
            raise UsageError(f"{what} is {value:g}; EXL3 has 1 to 8, and 1.5, 2.5, 3.5 with mul1")
    step = 2 * BLOCK  # an EXL3 head is split over two ranks
    if spec.quantise_head and spec.vocab_size % step:
        raise UsageError(
            f"vocab_size is {spec.vocab_size}, and an EXL3 head needs a multiple of {step}",
            fix=f"vocab_size {-(-spec.vocab_size // step) * step}, or an unquantised head",
        )
