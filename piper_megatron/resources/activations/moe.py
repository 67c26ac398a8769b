"""A MoE layer: router, dispatch, experts, combination, shared expert.

Sources, megatron/core of 0.19.2: transformer/moe/moe_layer.py, transformer/moe/experts.py
(`TEGroupedMLP`, `SequentialMLP`).
"""

from piper_megatron.layout.sizes import Number
from piper_megatron.resources.activations.dispatch import (
    AllGather,
    AllToAll,
    DeepEP,
    Dispatch,
    HybridEP,
)
from piper_megatron.resources.activations.mlp import activation, mlp_norm, shared_expert
from piper_megatron.resources.activations.piper_dispatch import Moved, Relayed
from piper_megatron.resources.activations.routing import (
    expert_rows,
    padded_rows,
    pads_rows,
    route,
)
from piper_megatron.resources.activations.setup import Setup, linear
from piper_megatron.resources.activations.tape import Tape, Tensor

PART = "experts"


def moe(tape: Tape, setup: Setup, hidden: Tensor) -> Tensor:
    """From the residual stream to what is added to it."""
    normed, region = mlp_norm(tape, setup, hidden)
    with tape.recomputed(setup.recomputes("moe"), "moe"):
        shared = shared_expert(tape, setup, normed) if setup.experts.shared_ffn else None
        if shared is not None and setup.training.overlap_moe_expert_parallel_comm:
            # the schedule's nodes hold on to it (models/gpt/fine_grained_callables.py: detach)
            tape.add("shared_experts", [shared], [], [shared], shares_gradient=True)
        probs = route(tape, setup, normed)
        routed = _routed(tape, setup, normed, probs)
        out = routed
        if shared is not None:
            out = tape.tensor("MoE output", setup.hidden_shard)
            tape.add("shared_experts", [routed, shared], [out], shares_gradient=True)
    region.until = out
    return out


def _routed(tape: Tape, setup: Setup, normed: Tensor, probs: Tensor) -> Tensor:
    """Routed experts, in the width of the latent space if there is one."""
    latent = setup.experts.latent
    x = normed
    if latent:
        x = tape.tensor("latent tokens", setup.shard * latent * setup.element)
        _latent_projection(tape, setup, normed, x, setup.model.hidden, latent)
    way = _way(tape, setup)
    rows, weights = way.there(x, probs)
    combined = way.back(_experts(tape, setup, rows, weights))
    tape.hold(way.held)
    if not latent:
        return combined
    out = tape.tensor("routed output", setup.hidden_shard)
    _latent_projection(tape, setup, combined, out, latent, setup.model.hidden)
    return out


def _way(tape: Tape, setup: Setup) -> Dispatch:
    """There and back by the dispatcher that the arguments name."""
    match setup.training.dispatcher:
        case "allgather":
            return AllGather(tape, setup)
        case "flex":
            return (DeepEP if setup.training.flex_backend == "deepep" else HybridEP)(tape, setup)
        case "rail" | "rbd":
            return Relayed(tape, setup)
        case "alltoall":
            return AllToAll(tape, setup)
    return Moved(tape, setup)


def _latent_projection(
    tape: Tape, setup: Setup, x: Tensor, out: Tensor, inputs: int, outputs: int
) -> None:
    linear(tape, setup, "latent", x, out, inputs=setup.shard * inputs, weight=inputs * outputs)


def _experts(tape: Tape, setup: Setup, rows: Tensor, weights: Tensor) -> Tensor:
    """Grouped or one after the other: what is kept is the same, their gradients are not."""
    model, experts, sizes = setup.model, setup.experts, setup.sizes
    width = experts.latent or model.hidden
    wide = experts.ffn * (2 if model.gated else 1) / sizes.etp
    narrow = experts.ffn / sizes.etp
    local = experts.count / sizes.ep
    padded = pads_rows(setup)
    count = padded_rows(setup) if padded else expert_rows(setup)
    if padded:
        rows = _copied(tape, rows, "padded rows", count * width * setup.element)
        weights = _copied(tape, weights, "padded weights", weights.bytes)
    if setup.training.moe_apply_probs_on_input:
        weighted = tape.tensor("weighted rows", rows.bytes)
        tape.add(PART, [rows, weights], [weighted], [rows, weights])
        rows = weighted
    grouped = setup.te and setup.training.moe_grouped_gemm
    pieces = 1 if grouped else local
    first = tape.tensor("first expert product", count * wide * setup.element, pieces=pieces)
    with tape.offloaded(setup.offloads("expert_fc1")):
        linear(
            tape,
            setup,
            PART,
            rows,
            first,
            inputs=count * width,
            weight=local * width * wide,
            keeps_original=setup.offloads("expert_fc1") and setup.training.fp8_recipe != "mxfp8",
        )
    if model.linear_bias and not setup.training.bias_activation_fusion:
        first = _copied(tape, first, "first expert product with bias", first.bytes)
    with (
        tape.offloaded(setup.offloads("moe_act")),
        tape.recomputed(setup.recomputes("moe_act"), PART, discards=True) as region,
    ):
        activated = activation(tape, setup, PART, first, count * narrow, weights, pieces)
    out = tape.tensor("second expert product", count * width * setup.element)
    linear(
        tape,
        setup,
        PART,
        activated,
        out,
        inputs=count * narrow,
        weight=local * width * narrow,
        keeps_original=setup.recomputes("moe_act") and setup.keeps_original_input,
    )
    region.until = out
    if padded:
        out = _copied(tape, out, "unpadded rows", expert_rows(setup) * width * setup.element)
    return out


def _copied(tape: Tape, x: Tensor, name: str, bytes: Number) -> Tensor:
    copy = tape.tensor(name, bytes)
    tape.add(PART, [x], [copy])
    return copy
