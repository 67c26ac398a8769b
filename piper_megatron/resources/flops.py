"""Floating-point operations of a training step, by the conventions that reports use.

None of them counts recomputation. Both are for comparing throughput; `compute.py` has the times.
"""

from typing import Literal

from piper_megatron.layout.job import Job
from piper_megatron.workload.spec import ModelSpec

Convention = Literal["megatron", "xmoe"]
_FORWARD_AND_BACKWARD = 3  # each product has two more backward
_MULTIPLY_ADD = 2


def step_flops(job: Job, convention: Convention = "megatron") -> float:
    """Operations of one step of the whole job.

    Args:
        job: model, batch and tensor-parallel size, which pads the vocabulary.
        convention: `megatron` counts as `megatron/training/training.py:
            num_floating_point_operations` of 0.19.2 does for unpacked sequences: causal attention,
            multi-token prediction, no router. `xmoe` counts as the X-MoE scripts do: attention
            over the full square, no router and no multi-token prediction (arXiv:2508.13337;
            Megatron-DeepSpeed-X-MoE 6cc4be61).
    """
    model, batch = job.model, job.batch
    tokens = batch.global_batch * batch.seq
    vocab = model.padded_vocab(job.layout.tp)
    projections, scores = _attention_multiplications(model)
    if convention == "xmoe":
        layers = model.layers * (projections + scores * batch.seq)
        layers += _mlp_multiplications(model, model.moe_layers, 3 if model.gated else 2)
        return (
            1.0 * _FORWARD_AND_BACKWARD * _MULTIPLY_ADD * tokens * (layers + vocab * model.hidden)
        )
    moe_layers = (*model.moe_layers, *(model.mtp_moe,) * model.mtp_layers)
    layers = len(moe_layers) * (projections + scores * batch.seq / 2)
    matrices = 3 if model.gated and not model.quick_geglu else 2
    layers += _mlp_multiplications(model, moe_layers, matrices)
    hidden = model.hidden
    prediction = model.mtp_layers * (3 * hidden + 2 * hidden**2)
    head = hidden * vocab * (1 + model.mtp_layers)
    return _FORWARD_AND_BACKWARD * _MULTIPLY_ADD * tokens * (layers + prediction + head)


def flops_utilisation(flops: float, seconds: float, peak_flops: float) -> float:
    """Model FLOP utilisation of one rank, the share of its dense peak.

    Args:
        flops: of one rank in that time.
        seconds: that they took.
        peak_flops: FLOP/s.
    """
    return flops / seconds / peak_flops


def _attention_multiplications(model: ModelSpec) -> tuple[float, float]:
    """Multiplications of a token in the projections, and those with each other token it meets."""
    attention, hidden = model.attention, model.hidden
    heads = attention.heads
    if attention.latent is None:
        queries = heads * attention.head_dim
        keys = attention.groups * attention.head_dim
        gate = queries if attention.output_gate else 0
        return hidden * (queries + 2 * keys + gate) + queries * hidden, 2 * queries
    latent = attention.latent
    query_dim = latent.qk_head_dim + latent.rope_head_dim
    # the ones stand for the norms of the low-rank projections
    if latent.q_rank is None:
        query = hidden * heads * query_dim
    else:
        query = latent.q_rank * (hidden + heads * query_dim + 1)
    key_value = latent.kv_rank * (hidden + heads * (latent.qk_head_dim + latent.v_head_dim) + 1)
    rotary = hidden * latent.rope_head_dim
    output = heads * latent.v_head_dim * hidden
    return query + key_value + rotary + output, heads * (query_dim + latent.v_head_dim)


def _mlp_multiplications(model: ModelSpec, moe_layers: tuple[bool, ...], matrices: int) -> float:
    """Multiplications of a token in all MLPs and experts of the given layers."""
    dense = matrices * model.hidden * model.ffn
    moe = 0.0
    experts = model.experts
    if experts is not None:
        width = experts.latent or model.hidden
        moe = matrices * (width * experts.ffn * experts.topk + model.hidden * experts.shared_ffn)
        if experts.latent:
            moe += 2 * model.hidden * experts.latent
    return sum(moe if is_moe else dense for is_moe in moe_layers)
