"""Small values for tests: name only the field that matters."""

from __future__ import annotations

from pathlib import Path

from appliance.checkpoint.model import (
    Checkpoint,
    DensePart,
    ExpertShape,
    LookupTable,
    MoeLayer,
    ProjectionShape,
)
from preflight.host import Gpu, Host, Limits, NumaNode

GIB = 1 << 30
RTX_PRO_6000_BYTES = 102_641_958_912


def expert(
    hidden: int = 256, inner: int = 256, bits: float = 3, codebook: str = "mcg"
) -> ExpertShape:
    wide = ProjectionShape(hidden, inner, bits, codebook)
    return ExpertShape(wide, wide, ProjectionShape(inner, hidden, bits, codebook))


def layer(
    index: int = 0,
    experts: int = 8,
    top_k: int = 2,
    shape: ExpertShape | None = None,
    draft: bool = False,
) -> MoeLayer:
    return MoeLayer(
        index=index,
        prefix=f"model.layers.{index}.mlp.experts",
        projection_names=("gate_proj", "up_proj", "down_proj"),
        experts=(shape or expert(),) * experts,
        top_k=top_k,
        draft=draft,
    )


def checkpoint(
    layers: tuple[MoeLayer, ...] | None = None,
    dense: tuple[DensePart, ...] = (),
    tables: tuple[LookupTable, ...] = (),
    model_type: str = "qwen3_moe",
    rank_sliced: int | None = None,
    quantisation: str = "exl3",
    **config: object,
) -> Checkpoint:
    layers = (layer(0), layer(1)) if layers is None else layers
    shape = layers[0].experts[0] if layers else expert()
    settings: dict[str, object] = {
        "num_hidden_layers": len(layers),
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }
    return Checkpoint(
        path=Path("model"),
        family="deepseek_v4" if model_type.startswith("deepseek_v4") else model_type,
        model_type=model_type,
        hidden_size=shape.gate.k,
        intermediate_size=shape.gate.n,
        layers=layers,
        tables=tables,
        dense=dense,
        size_bytes=sum(la.size_bytes for la in layers) + sum(d.size_bytes for d in dense),
        digest="c" * 64,
        config=settings | config,
        tensors={},
        rank_sliced=rank_sliced,
        quantisation=quantisation,
    )


def gpu(index: int = 0, memory: int | None = RTX_PRO_6000_BYTES, numa_node: int | None = 0,
        generation: int = 5, width: int = 16) -> Gpu:  # fmt: skip
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        memory_total_bytes=memory,
        compute_capability="12.0",
        numa_node=numa_node,
        pcie_generation_max=generation,
        pcie_width=width,
    )


def host(
    gpus: tuple[Gpu, ...] | None = (),
    memory: int = 512 * GIB,
    nodes: int = 2,
    memory_max: int | None = None,
) -> Host:
    each = memory // nodes
    return Host(
        memory_total_bytes=memory,
        memory_available_bytes=memory,
        memory_free_bytes=memory,
        numa_nodes=tuple(
            NumaNode(index=i, memory_total_bytes=each, memory_free_bytes=each) for i in range(nodes)
        ),
        gpus=gpus,
        limits=Limits(cgroup_memory_max_bytes=memory_max),
    )


def deepseek_v41_flash() -> Checkpoint:
    """The 3-bit package of FACTS section 1: experts exact, dense parts by its byte ledger.

    3.40 GiB are whole on every rank; embedding and head are among them.
    """
    shape = expert(5120, 2304, 3, "mul1")
    gib = {"attention": (3.78, 0.94), "shared_experts": (1.32, 0), "embedding": (0, 1.23),
           "head": (1.23, 0), "vision": (0, 0.90), "other": (0.04, 0.33)}  # fmt: skip
    dense = tuple(
        DensePart(role, int(size * GIB), tensor_parallel)
        for role, sizes in gib.items()
        for tensor_parallel, size in zip((True, False), sizes, strict=True)
        if size
    )
    row = 144
    rows = int(103.0 * GIB) // (2 * row)
    tables = tuple(LookupTable(f"engram.{i}", i, rows, row, rows * row, "int4") for i in (1, 14))
    return checkpoint(
        tuple(layer(i, 384, 6, shape) for i in range(40)),
        dense,
        tables,
        "deepseek_v41",
        num_hidden_layers=40,
        num_attention_heads=64,
        max_position_embeddings=1_048_576,
        vocab_size=129_280,
    )
