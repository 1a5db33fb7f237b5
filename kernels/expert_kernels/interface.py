"""csrc's C interface: its structs field by field, and the library that has it, loaded once."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from expert_kernels import build

ABI = 11
CODEBOOKS = {"3inst": 0, "mcg": 1, "mul1": 2}
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NO_CODE = 209  # cudaErrorNoKernelImageForDevice: a library of other cards loads, and launches not
NO_CODE_FIX = (
    "kernels built for this card (python -m expert_kernels.build --arch sm_89 for compute "
    "capability 8.9), or an image built with its number in TORCH_CUDA_ARCH_LIST"
)
_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint64


class Decode(ctypes.Structure):
    """ExpertsDecode of csrc/experts.h, field by field."""

    _fields_ = (
        ("table", _P),
        ("ids", _P),
        ("weights", _P),
        ("x", _P),
        ("out", _P),
        ("host_begin", _L),
        ("host_end", _L),
        ("rotated", _P),
        ("act", _P),
        ("partial_a", _P),
        ("partial_b", _P),
        ("y", _P),
        ("control", _P),
        ("picks", _P),
        ("reads", _P),
        ("fill", _P),
        ("trace", _P),
        ("ids_are_64", _I),
        ("dtype", _I),
        ("tokens", _I),
        ("top_k", _I),
        ("experts", _I),
        ("hidden", _I),
        ("intermediate", _I),
        ("bits8", _I * 3),
        ("codebook", _I),
        ("split_a", _I),
        ("split_b", _I),
        ("groups", _I),
        ("blocks", _I),
        ("host_blocks", _I),
        ("link_percent", _I),
        ("link_bytes", _I),
        ("ring_bytes", _I),
        ("weight_on_input", _I),
        ("swiglu_limit", ctypes.c_float),
    )


MATRICES = 4  # of one launch: csrc/experts.h, EXPERTS_MATRICES


class Matrix(ctypes.Structure):
    """ExpertsMatrix of csrc/experts.h, field by field."""

    _fields_ = (
        *((name, _P) for name in ("trellis", "suh", "svh")),
        *((name, _I) for name in ("n", "bits8", "skip", "columns", "at")),
    )


class Linear(ctypes.Structure):
    """ExpertsLinear of csrc/experts.h, field by field."""

    _fields_ = (
        ("matrix", Matrix * MATRICES),
        *((name, _P) for name in ("x", "out", "rotated", "partial", "arrived")),
        *((name, _I) for name in ("count", "rows", "k", "stride", "dtype", "codebook")),
        *((name, _I) for name in ("blocks", "split", "groups", "ring_bytes")),
    )


class Prefill(ctypes.Structure):
    """ExpertsPrefill of csrc/experts.h, field by field."""

    _fields_ = (
        *((name, _P) for name in ("table", "ids", "weights", "x", "out", "order", "place")),
        *((name, _P) for name in ("input_gate", "input_up", "gate", "up", "act", "y")),
        ("first", ctypes.c_int64),
        *((name, _I) for name in ("group_rows", "at", "rows", "ids_are_64", "dtype", "tokens")),
        *((name, _I) for name in ("top_k", "experts", "hidden", "intermediate", "weight_on_input")),
        ("swiglu_limit", ctypes.c_float),
    )


class CudaError(RuntimeError):
    """A kernel could not be launched. The message has the driver's words."""


@lru_cache
def library(architecture: str) -> ctypes.CDLL:
    """csrc, loaded for "sm_90" and the like; compiled first if nobody has."""
    path = build.library_path(architecture)
    lib = ctypes.CDLL(str(path))
    lib.experts_error.restype = ctypes.c_char_p
    lib.experts_control_bytes.restype = ctypes.c_int64
    lib.experts_decode.argtypes = [ctypes.POINTER(Decode), _P]
    lib.experts_linear.argtypes = [ctypes.POINTER(Linear), _P]
    lib.experts_reconstruct.argtypes = [_P, _P, *[ctypes.c_int] * 4, _P]
    lib.experts_reconstruct_expert.argtypes = [_P, _P, *[ctypes.c_int] * 2, _P, ctypes.c_int, _P]
    lib.experts_rotate_in.argtypes = [_P, _P, _P, *[ctypes.c_int] * 3, _P]
    lib.experts_rotate_out.argtypes = [_P, _P, _P, *[ctypes.c_int] * 6, _P]
    lib.experts_prefill.argtypes = [_P, ctypes.c_int, _P]
    lib.experts_pieces.argtypes = [_P, _P, ctypes.c_int, _P, ctypes.c_int, _P]
    lib.experts_lookup.argtypes = [
        *(_P, ctypes.c_int64, _P, _P, ctypes.c_int64, _P, ctypes.c_int, ctypes.c_int, _P)
    ]
    lib.experts_copy.argtypes = [_P, _P, ctypes.c_int64, _P]
    if lib.experts_abi() != ABI:
        raise build.BuildError(
            f"{path} has interface {lib.experts_abi()}, this code speaks {ABI}. Try: build it again"
        )
    return lib


@lru_cache
def _device(index: int) -> tuple[str, int]:
    p = torch.cuda.get_device_properties(index)
    return f"sm_{p.major}{p.minor}", p.multi_processor_count


def device_of(device: torch.device) -> tuple[str, int]:
    """Architecture ("sm_90") and multiprocessors of a GPU."""
    return _device(index_of(device))


def library_for(device: torch.device) -> ctypes.CDLL:
    return library(device_of(device)[0])


def index_of(device: torch.device) -> int:
    """A device without a number is the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


def check(lib: ctypes.CDLL, code: int, what: str) -> None:
    if code:
        said = f"{what}: CUDA error {code}, {lib.experts_error(code).decode()}"
        raise CudaError(f"{said}. Try: {NO_CODE_FIX}" if code == NO_CODE else said)
