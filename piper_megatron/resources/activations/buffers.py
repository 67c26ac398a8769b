"""Device memory that is neither state nor activation, and stays once it is allocated.

Sources. Megatron-Core 0.19.2: tensor_parallel/layers.py and mappings.py
(`get_global_memory_buffer`, `get_dummy_wgrad`), transformer/dot_product_attention.py. Transformer
Engine 2.20: pytorch/module/base.py (`get_dummy_wgrad`), pytorch/cpp_extensions/gemm.py
(`get_cublas_workspace`). torch: aten/src/ATen/cuda/CublasHandlePool.cpp
(`getCUDABlasLtWorkspace`, `getChosenWorkspaceSize`).
"""

from collections.abc import Collection

import numpy as np

from piper_megatron.layout.job import Job
from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.resources.activations.layer import setup_of
from piper_megatron.resources.activations.setup import Setup
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

_TORCH_WORKSPACES = 2  # one for each thread with a cuBLAS handle: forward and backward
_GROUPED_STREAMS = 4  # tex.get_num_cublas_streams

Shape = tuple[Number, Number]


def stage_buffers(job: Job, stage: int, workspace_bytes: float) -> dict[str, Number]:
    """Bytes of such buffers on a rank of a pipeline stage, by what they are for.

    Args:
        job: the whole job.
        stage: pipeline rank.
        workspace_bytes: of one workspace, see `MemoryOverheads.workspace_gib`.
    """
    chunks = job.pipeline.stages[stage]
    kinds = {job.model.moe_layers[layer] for chunk in chunks for layer in chunk.layers}
    has_mtp = any(chunk.mtp_layers for chunk in chunks)
    if has_mtp:
        kinds.add(job.model.mtp_moe)
    return buffers(
        job.model,
        job.training,
        job.sizes,
        workspace_bytes,
        moe=kinds,
        head=any(chunk.loss for chunk in chunks),
        mtp=has_mtp,
    )


def buffers(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    workspace_bytes: float,
    *,
    moe: Collection[bool],
    head: bool,
    mtp: bool = False,
) -> dict[str, Number]:
    """The same from what a rank holds; sizes may be arrays.

    Args:
        model: as for a layer.
        training: as for a layer.
        sizes: as for a layer.
        workspace_bytes: of one workspace.
        moe: for each kind of layer that it holds, whether that has experts.
        head: it holds the output layer.
        mtp: it holds multi-token-prediction layers.
    """
    setup = setup_of(model, training, sizes)
    return {
        "placeholder weight gradients": _placeholder_gradients(setup, moe, head, mtp),
        "gather buffer": _gather_buffer(setup, bool(moe), head),
        "workspaces of matrix products": workspace_bytes * _workspaces(setup),
    }


def _placeholder_gradients(setup: Setup, moe: Collection[bool], head: bool, mtp: bool) -> Number:
    """Autograd is handed a gradient for each weight whose real one is accumulated already.

    One is kept for each shape, as wide as the weight.
    """
    if not (setup.te and setup.training.gradient_accumulation_fusion):
        return 0
    hidden, tp = setup.model.hidden, setup.sizes.tp
    shapes: list[Shape] = []
    for has_experts in moe:
        shapes += _attention_shapes(setup)
        shapes += _expert_shapes(setup) if has_experts else _mlp_shapes(setup, setup.model.ffn)
    if mtp:
        shapes.append((hidden / tp, 2 * hidden))
    if head:
        shapes.append((setup.vocabulary, hidden))
    elements: Number = 0
    for place, (rows, columns) in enumerate(shapes):
        known = np.asarray(False)
        for other_rows, other_columns in shapes[:place]:
            known = known | (np.equal(rows, other_rows) & np.equal(columns, other_columns))
        elements = elements + np.where(known, 0, rows * columns)
    return elements * setup.element


def _mlp_shapes(setup: Setup, ffn: int) -> list[Shape]:
    """(outputs, inputs) of both weights on one rank."""
    hidden, tp = setup.model.hidden, setup.sizes.tp
    return [((2 if setup.model.gated else 1) * ffn / tp, hidden), (hidden, ffn / tp)]


def _expert_shapes(setup: Setup) -> list[Shape]:
    experts, etp, hidden = setup.experts, setup.sizes.etp, setup.model.hidden
    width = experts.latent or hidden
    halves = 2 if setup.model.gated else 1
    shapes: list[Shape] = [(halves * experts.ffn / etp, width), (width, experts.ffn / etp)]
    if experts.latent:
        shapes += [(width, hidden), (hidden, width)]
    if experts.shared_ffn:
        shapes += _mlp_shapes(setup, experts.shared_ffn)
    return shapes


def _attention_shapes(setup: Setup) -> list[Shape]:
    attention, hidden, tp = setup.model.attention, setup.model.hidden, setup.sizes.tp
    latent = attention.latent
    if latent is None:
        queries = attention.heads * attention.head_dim
        outputs = queries * (2 if attention.output_gate else 1)
        outputs += 2 * attention.groups * attention.head_dim
        return [(outputs / tp, hidden), (hidden, queries / tp)]
    queries = attention.heads * (latent.qk_head_dim + latent.rope_head_dim)
    pairs = attention.heads * (latent.qk_head_dim + latent.v_head_dim)
    down = [(latent.q_rank, hidden)] if latent.q_rank else []
    return [
        *down,
        (queries / tp, latent.q_rank or hidden),
        (latent.kv_rank + latent.rope_head_dim, hidden),
        (pairs / tp, latent.kv_rank),
        (hidden, attention.heads * latent.v_head_dim / tp),
    ]


def _gather_buffer(setup: Setup, layers: bool, head: bool) -> Number:
    """Megatron's one buffer for gathered inputs, as large as its largest use."""
    sizes, model = setup.sizes, setup.model
    most: Number = 0
    if head or (layers and not setup.te):
        most = setup.if_split(setup.tokens * model.hidden * setup.element)
    if setup.training.dispatcher == "allgather" and model.experts and layers:
        group = sizes.ep * sizes.etp
        width = model.experts.latent or model.hidden
        gathered = setup.shard * group * width * setup.element
        most = np.maximum(most, np.where(np.asarray(group) > 1, gathered, 0))
    if not setup.te and layers:
        heads = model.attention.heads / sizes.tp
        scores = setup.tokens * sizes.seq * heads * setup.element
        most = np.maximum(most, scores)
    return most


def _workspaces(setup: Setup) -> int:
    """How many cuBLAS has: of torch, of Transformer Engine and of its grouped products.

    Megatron's router uses Transformer Engine's where that is installed, whatever the layers are.
    """
    own = 3 if setup.training.tp_comm_overlap else 1
    grouped = setup.te and setup.model.experts is not None and setup.training.moe_grouped_gemm
    streams = _GROUPED_STREAMS if grouped else 0
    return _TORCH_WORKSPACES + own + streams
