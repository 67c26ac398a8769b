"""The router of a MoE layer, and how many rows its decisions make.

Sources, megatron/core of 0.19.2: transformer/moe/router.py (`TopKRouter`),
transformer/moe/moe_utils.py (`topk_routing_with_score_function`,
`compute_routing_scores_for_aux_loss`, `apply_router_token_dropping`, `get_capacity`); Transformer
Engine 2.20: pytorch/router.py.
"""

import numpy as np

from piper_megatron.layout.sizes import Number
from piper_megatron.resources.activations.setup import FP32, INT64, Setup
from piper_megatron.resources.activations.tape import Tape, Tensor

_AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def sent_rows(setup: Setup) -> Number:
    """Rows that this rank sends to experts, one for each token and expert that it visits."""
    experts = setup.experts
    rows = setup.shard * experts.topk
    if experts.capacity_factor is not None:
        capacity = np.ceil(rows / experts.count * experts.capacity_factor)
        if experts.pad_to_capacity:
            return capacity * experts.count
        rows = np.minimum(rows, capacity * experts.count)
    if setup.training.moe_router_padding_for_quantization:
        rows = _aligned(rows, experts.count, alignment(setup))
    return rows


def expert_rows(setup: Setup) -> Number:
    """Rows that the experts of the most loaded rank compute."""
    experts = setup.experts
    rows = sent_rows(setup) * setup.sizes.etp
    if experts.pad_to_capacity:
        return rows
    if experts.capacity_factor is not None:
        most = setup.shard * experts.topk * experts.capacity_factor * setup.sizes.etp
        return np.minimum(rows * setup.imbalance, most)
    return rows * setup.imbalance


def padded_rows(setup: Setup) -> Number:
    """`expert_rows` with each expert's share rounded up to what 8-bit products need."""
    return _aligned(expert_rows(setup), setup.experts.count / setup.sizes.ep, alignment(setup))


def pads_rows(setup: Setup) -> bool:
    """Whether experts pad rows themselves (moe_utils.py: skip_routed_expert_padding)."""
    training = setup.training
    padded_before = training.moe_router_padding_for_quantization or (
        training.dispatcher == "flex" and training.flex_backend in ("hybridep", "ncclep")
    )
    return setup.quantized is not None and not padded_before


def alignment(setup: Setup) -> int:
    """Rows of an expert come in multiples of this (get_align_size_for_quantization)."""
    if setup.training.use_transformer_engine_op_fuser:
        return 256
    return 32 if setup.training.fp4 or setup.training.fp8_recipe == "mxfp8" else 16


def probability_bytes(setup: Setup) -> int:
    """Bytes of a routing probability."""
    return {"fp32": 4, "fp64": 8}.get(setup.training.moe_router_dtype or "", setup.element)


def route(tape: Tape, setup: Setup, normed: Tensor) -> Tensor:
    """The router: from hidden states to a probability for every token and expert.

    Args:
        tape: to write on.
        setup: of the layer.
        normed: the layer's normalized hidden states.
    """
    experts = setup.experts
    pairs = setup.shard * experts.count
    element = probability_bytes(setup)
    logits = tape.tensor("router logits", pairs * element)
    probs = tape.tensor("routing probabilities", pairs * element)
    tape.add("router", [normed], [logits], [normed])
    if setup.training.moe_router_fusion:
        internals = [
            tape.tensor("router scores", pairs * FP32, differentiable=False),
            tape.tensor("routing map", pairs, differentiable=False),
        ]
        tape.add("router", [logits], [probs, *internals], internals)
    else:
        _scored(tape, setup, logits, probs)
    if _has_aux_loss(setup):
        sums = 0 if experts.score_function == "softmax" else setup.shard
        scores = tape.tensor("auxiliary scores", (pairs + sums) * FP32, differentiable=False)
        tape.add("router", [logits], [scores], [scores])
    if experts.capacity_factor is not None:
        probs = _dropped(tape, setup, probs)
    return probs


def _scored(tape: Tape, setup: Setup, logits: Tensor, probs: Tensor) -> None:
    """Scores and choice out of single operations."""
    experts = setup.experts
    chosen = setup.shard * experts.topk
    pairs = setup.shard * experts.count
    indices = tape.tensor("chosen experts", chosen * INT64, differentiable=False)
    chosen_scores = tape.tensor("scores of the chosen", chosen * FP32)
    internals = [indices, chosen_scores]
    if experts.score_function != "softmax" or setup.training.moe_router_pre_softmax:
        internals.append(tape.tensor("router scores", pairs * FP32, differentiable=False))
    if experts.score_function == "sqrtsoftplus":
        internals.append(tape.tensor("softplus", pairs * FP32, differentiable=False))
    if experts.score_function != "softmax" and experts.topk > 1:
        sums = tape.tensor("sums of scores", setup.shard * FP32, differentiable=False)
        internals.append(sums)
    keeps = [tensor for tensor in internals if tensor is not chosen_scores]
    if _keeps_chosen_scores(setup):
        keeps.append(chosen_scores)
    tape.add("router", [logits], internals, keeps)
    tape.add("router", [chosen_scores], [probs])


def _keeps_chosen_scores(setup: Setup) -> bool:
    """Normalizing the chosen scores keeps them; softmax before the choice normalizes all."""
    if setup.experts.score_function == "softmax":
        return not setup.training.moe_router_pre_softmax
    return setup.experts.topk > 1


def _has_aux_loss(setup: Setup) -> bool:
    return any(
        kind in _AUX_LOSSES and coefficient > 0
        for kind, coefficient in zip(
            setup.training.moe_router_load_balancing_type,
            setup.training.moe_aux_loss_coeff,
            strict=False,
        )
    )


def _dropped(tape: Tape, setup: Setup, probs: Tensor) -> Tensor:
    """Probabilities times the map of rows within capacity, which is kept."""
    pairs = setup.shard * setup.experts.count
    kept_map = tape.tensor("map within capacity", pairs, differentiable=False)
    out = tape.tensor("routing probabilities", probs.bytes)
    tape.add("router", [probs], [out, kept_map], [kept_map])
    return out


def _aligned(rows: Number, groups: Number, multiple: int) -> Number:
    return np.ceil(rows / groups / multiple) * multiple * groups
