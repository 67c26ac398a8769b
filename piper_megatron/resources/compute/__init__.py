"""Compute time of layers, of both ends of the model and of the optimizer step, on one rank.

The operations are those of Megatron-Core 0.19.2, the curves those of the accelerator. Nothing here
waits for another rank: `communication.py` has that.

setting.py           what operations depend on; linears and elementwise kernels of a layer
attention.py         projections, rotary embedding, core attention
experts.py           router, permutation, experts, shared experts
layer.py             a transformer layer: its parts, recomputation, CUDA graphs
ends.py              embedding, output layer and loss, multi-token prediction
optimizer.py         the optimizer step
"""

from piper_megatron.resources.compute.ends import (
    embedding_compute,
    head_compute,
    prediction_compute,
)
from piper_megatron.resources.compute.layer import layer_compute
from piper_megatron.resources.compute.optimizer import optimizer_seconds

__all__ = [
    "embedding_compute",
    "head_compute",
    "layer_compute",
    "optimizer_seconds",
    "prediction_compute",
]
