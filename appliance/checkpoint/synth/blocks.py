"""What the families share: embedding, MLPs, experts, head, and the sizes of their values.

Inputs of every linear have a root mean square near 1 (a norm comes before), and a weight drawn
with gain g makes outputs of standard deviation g. Attention and MLPs add about 1 to a residual of
about 1, so no layer is a bystander and none explodes. Router scores spread by ROUTER_GAIN, so
tokens choose different experts; logits spread by HEAD_GAIN, so the best token leads clearly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

from appliance.checkpoint.synth import draw, kinds
from appliance.checkpoint.synth.parts import Part, dense, exl3, norm, splits_over_two_ranks
from appliance.checkpoint.synth.spec import SynthSpec

GATE_GAIN = 2.0
OUTPUT_GAIN = 2.0  # an average over tokens or experts has shrunk the values before
ROUTER_GAIN = 2.0
HEAD_GAIN = 6.0
CONTEXT = 8192


def config(spec: SynthSpec) -> dict[str, object]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": 2 * spec.hidden_size,
        "max_position_embeddings": CONTEXT,
        "moe_intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.heads,
        "num_experts_per_tok": spec.top_k,
        "num_hidden_layers": spec.layers,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        # What EXL3 kernels compute in. In bf16 nearly tied experts of a random router swap too
        # often for known answers, which come from float32, to hold.
        "torch_dtype": "float16",
        "use_cache": True,
        "vocab_size": spec.vocab_size,
    }


Block = Callable[[SynthSpec, str], Iterator[Part]]


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def decoder(
    spec: SynthSpec,
    quiet: Collection[int],
    attention: Block,
    moe: Block,
    moe_name: str = "mlp",
) -> Iterator[Part]:
    """Every tensor of the model, first to last; the family gives its attention and its experts."""
    yield embedding(spec)
    for layer in range(spec.layers):
        name = f"model.layers.{layer}"
        yield norm(f"{name}.input_layernorm", spec.hidden_size)
        yield from attention(spec, f"{name}.self_attn")
        yield norm(f"{name}.post_attention_layernorm", spec.hidden_size)
        if layer < spec.dense_layers:
            yield from mlp(spec, f"{name}.mlp", 2 * spec.hidden_size)
        else:
            yield from moe(spec, f"{name}.{moe_name}")
    yield norm("model.norm", spec.hidden_size)
    yield from head(spec, quiet)


def embedding(spec: SynthSpec) -> Part:
    shape = (spec.vocab_size, spec.hidden_size)
    drawn = draw.normal(math.prod(shape), 1.0)
    values = kinds.embedding(spec) if spec.router == "decided" else drawn
    return Part("model.embed_tokens.weight", "BF16", shape, values)


def router(spec: SynthSpec, name: str) -> Iterator[Part]:
    if spec.router == "decided":
        shape = (spec.experts, spec.hidden_size)
        return iter([Part(f"{name}.weight", "BF16", shape, kinds.router(spec))])
    return dense(name, spec.hidden_size, spec.experts, gain=ROUTER_GAIN)


def linear(
    spec: SynthSpec, name: str, k: int, n: int, *, along: str, gain: float = 1.0
) -> Iterator[Part]:
    """EXL3 if it and its halves on two ranks are whole blocks of 128, else bf16."""
    if splits_over_two_ranks(k, n, along=along):
        return exl3(name, k, n, spec.dense_bits, spec.codebook, gain=gain)
    return dense(name, k, n, gain=gain)


def mlp(spec: SynthSpec, name: str, intermediate: int) -> Iterator[Part]:
    hidden = spec.hidden_size
    yield from linear(spec, f"{name}.gate_proj", hidden, intermediate, along="n", gain=GATE_GAIN)
    yield from linear(spec, f"{name}.up_proj", hidden, intermediate, along="n")
    yield from linear(spec, f"{name}.down_proj", intermediate, hidden, along="k", gain=OUTPUT_GAIN)


def experts(
    spec: SynthSpec, name: str, words: tuple[str, str, str] = PROJECTIONS
) -> Iterator[Part]:
    """`words`: the family's for gate, up and down."""
    hidden, inner, book = spec.hidden_size, spec.intermediate_size, spec.codebook
    gate, up, down = spec.bits
    for expert in range(spec.experts):
        to_gate, to_up, to_down = (f"{name}.{expert}.{word}" for word in words)
        yield from exl3(to_gate, hidden, inner, gate, book, gain=GATE_GAIN)
        yield from exl3(to_up, hidden, inner, up, book)
        yield from exl3(to_down, inner, hidden, down, book, gain=OUTPUT_GAIN)


def head(spec: SynthSpec, quiet: Collection[int]) -> Iterator[Part]:
    """lm_head; tokens in `quiet` get logits near 0 and so never win."""
    size = (spec.hidden_size, spec.vocab_size)
    if spec.quantise_head:
        book = spec.codebook
        return exl3("lm_head", *size, spec.head_bits, book, gain=HEAD_GAIN, quiet=quiet)
    return dense("lm_head", *size, gain=HEAD_GAIN, quiet=quiet)
