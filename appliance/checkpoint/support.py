"""Valid checkpoints that this engine cannot serve: the reason in one sentence."""

from __future__ import annotations

from appliance.checkpoint.linears import HADAMARD
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


def require_tensor_parallel(checkpoint: Checkpoint, degree: int) -> None:
    """Raise UnsupportedError where `degree` ranks cannot share each expert correctly.

    Gate and up are cut along n, down along k: the experts' intermediate size. A slice that is no
    multiple of 128 cuts through a Hadamard block and corrupts silently.
    """
    sliced = checkpoint.rank_sliced
    if sliced not in (None, degree):
        raise UnsupportedError(
            f"{checkpoint.path} is sliced for tensor parallelism {sliced}, not {degree}",
            fix=f"use {sliced} GPUs with tensor parallelism {sliced}",
        )
    size = checkpoint.intermediate_size
    if size % (degree * HADAMARD):
        fits = [d for d in range(1, degree) if size % (d * HADAMARD) == 0]
        raise UnsupportedError(
            f"{checkpoint.path}: experts of intermediate size {size} cut for {degree} ranks are "
            f"{size / degree:g} wide, no multiple of {HADAMARD}",
            fix=f"tensor parallelism {max(fits)}, or expert parallelism" if fits else None,
        )
