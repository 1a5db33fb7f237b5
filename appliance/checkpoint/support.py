"""Valid checkpoints that this engine cannot serve: the reason in one sentence."""

from __future__ import annotations

from appliance.checkpoint.model import Checkpoint
from appliance.errors import UnsupportedError

_WHY = {
    "none": "the model has no routed experts, so there is nothing to place",
    "exl3-fused": "its EXL3 experts are fused; each needs tensors of its own",
    "mixed": "only some of its layers have EXL3 experts; all must",
}


def require_exl3(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError unless every routed expert of the target is EXL3, one by one."""
    stored_as = checkpoint.quantisation
    if stored_as != "exl3":
        why = _WHY.get(stored_as, f"its routed experts are stored as {stored_as}, not as EXL3")
        raise UnsupportedError(
            f"{checkpoint.path}: {why}", fix="serve an EXL3 quantisation of this model"
        )
