"""What the ops refuse, in a sentence with the numbers; and that importing the package is free."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import expert_kernels
from expert_kernels import interface, ops

pytestmark = pytest.mark.engine


def table(**changes: Any) -> ops.ExpertTable:
    """Two experts that nobody loaded."""
    empty = ops.ExpertTable(torch.zeros(2, 3, 3, dtype=torch.int64), 256, 128, (3, 3, 3), "mcg")
    return dataclasses.replace(empty, **changes)


def call(**changes: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "x": torch.zeros(4, 256),
        "topk_weights": torch.ones(4, 2),
        "topk_ids": torch.full((4, 2), -1),
        "table": table(),
    }
    return ops.experts(**{**arguments, **changes})


def test_a_call_that_fits_the_contract_is_accepted() -> None:
    assert call().shape == (4, 256)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"addresses": torch.zeros(2, 9, dtype=torch.int64)}, r"int64 \[experts, 3, 3\].*\[2, 9\]"),
        ({"addresses": torch.zeros(2, 3, 3)}, r"not torch.float32 \[2, 3, 3\]"),
        ({"intermediate_size": 576}, "intermediate_size is 576; .* expert parallelism"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"bits": (3.0, 3.0)}, "bits has 2 entries"),
        ({"bits": (3.0, 3.0, 9.0)}, "EXL3 has no 9-bit weights"),
        ({"bits": (2.5, 3.0, 3.0)}, "2.5-bit weights exist with codebook mul1 only, not mcg"),
        ({"codebook": "mgc"}, "'mgc' is none of 3inst, mcg, mul1"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        table(**changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"x": torch.zeros(4, 128)}, r"x must be floating \[tokens, 256\], not .*\[4, 128\]"),
        ({"x": torch.zeros(4, 256, dtype=torch.int32)}, "not torch.int32"),
        ({"topk_ids": torch.zeros(3, 2, dtype=torch.int64)}, r"\[4, k\], not \[3, 2\]"),
        ({"topk_ids": torch.zeros(4, 2)}, "int32 or int64, not torch.float32"),
        ({"topk_weights": torch.ones(4, 3)}, r"float32 \[4, 2\] like topk_ids, not .*\[4, 3\]"),
        ({"topk_weights": torch.ones(4, 2).half()}, "not torch.float16"),
        ({"topk_ids": torch.full((4, 2), 2)}, "run from 2 to 2; the table has rows 0 to 1"),
        ({"topk_ids": torch.full((4, 2), -2)}, "run from -2 to -2"),
        ({"swiglu_limit": 0.0}, "swiglu_limit is 0.0; it must be positive, or None"),
        ({"x": torch.zeros(4, 256, device="meta")}, "x is on meta, .* they must share a device"),
    ],
)
def test_a_call_outside_the_contract_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(**changes)


def test_an_expert_that_is_not_here_is_named_instead_of_read() -> None:
    with pytest.raises(ValueError, match=r"expert 1 has no gate.trellis: its address is 0"):
        call(topk_ids=torch.full((4, 2), 1))
    addresses = torch.full((2, 3, 3), 4096)
    addresses[0, 2, 1] = 0
    with pytest.raises(ValueError, match=r"expert 0 has no down.suh"):
        call(topk_ids=torch.zeros(4, 2, dtype=torch.int64), table=table(addresses=addresses))


def test_a_trellis_off_its_line_is_refused_and_never_slow_in_silence() -> None:
    addresses = torch.full((2, 3, 3), 4096)
    addresses[0, 1, 0] += 64
    with pytest.raises(ValueError, match=r"up.trellis is at 0x1040, 64 bytes off a 128-byte line"):
        call(topk_ids=torch.zeros(4, 2, dtype=torch.int64), table=table(addresses=addresses))


def test_a_device_without_kernels_is_said_and_not_computed_elsewhere() -> None:
    with torch.device("meta"):
        arguments = {
            "x": torch.zeros(4, 256),
            "topk_weights": torch.ones(4, 2),
            "topk_ids": torch.zeros(4, 2, dtype=torch.int64),
            "table": table(),
        }
    with pytest.raises(NotImplementedError, match=r"experts on meta: .* CPU and CUDA"):
        ops.experts(**arguments)


def test_a_card_that_the_library_was_not_built_for_is_told_the_way_out() -> None:
    library: Any = SimpleNamespace(experts_error=lambda code: b"no kernel image is available")
    with pytest.raises(interface.CudaError, match=r"error 209, no kernel .* Try: .* --arch sm_89"):
        interface.check(library, 209, "routed layer")
    with pytest.raises(interface.CudaError, match=r"routed layer: CUDA error 2, no kernel[^.]*$"):
        interface.check(library, 2, "routed layer")
    interface.check(library, 0, "routed layer")


def test_importing_the_package_does_not_import_torch() -> None:
    source = Path(expert_kernels.__file__).parent.parent
    code = "import sys, expert_kernels; sys.exit('torch' in sys.modules)"
    environment = {"PYTHONPATH": str(source)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
