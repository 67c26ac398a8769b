"""Activation memory: bytes kept from forward to backward, and what runs beside them.

tape.py              tensors and operations, and what follows for memory
setup.py             what a layer is built from; norms and linears
attention.py, latent_attention.py, core_attention.py
mlp.py, routing.py, dispatch.py, moe.py
layer.py, ends.py    a transformer layer; embedding, head, loss, multi-token prediction
chunk.py             a virtual stage
buffers.py           what is allocated once and stays
"""

from piper_megatron.resources.activations.buffers import buffers, stage_buffers
from piper_megatron.resources.activations.chunk import ChunkActivations, chunk_activations
from piper_megatron.resources.activations.ends import (
    embedding_activations,
    head_activations,
    mtp_activations,
)
from piper_megatron.resources.activations.layer import (
    ROUTED,
    Activations,
    layer_activations,
)

__all__ = [
    "ROUTED",
    "Activations",
    "ChunkActivations",
    "buffers",
    "chunk_activations",
    "embedding_activations",
    "head_activations",
    "layer_activations",
    "mtp_activations",
    "stage_buffers",
]
