"""Two matrix products with an activation function between: dense MLP, shared expert, experts.

Sources, megatron/core of 0.19.2: transformer/mlp.py, transformer/moe/experts.py,
transformer/moe/shared_experts.py, fusions/fused_bias_swiglu.py, fusions/fused_bias_gelu.py.
"""

from piper_megatron.layout.sizes import Number
from piper_megatron.resources.activations.core_attention import dropout
from piper_megatron.resources.activations.setup import FP32, Setup, linear, norm, norm_linear
from piper_megatron.resources.activations.tape import Region, Tape, Tensor


def dense_mlp(tape: Tape, setup: Setup, hidden: Tensor) -> Tensor:
    """From the residual stream to what is added to it."""
    if setup.te:
        with tape.recomputed(setup.recomputes("mlp"), "mlp"):
            return _two_linears(tape, setup, hidden, setup.model.ffn, "mlp", norm_inside=True)
    normed, region = mlp_norm(tape, setup, hidden)
    with tape.recomputed(setup.recomputes("mlp"), "mlp"):
        out = _two_linears(tape, setup, normed, setup.model.ffn, "mlp")
    region.until = out
    return out


def shared_expert(tape: Tape, setup: Setup, normed: Tensor) -> Tensor:
    """The shared expert of a MoE layer; `normed`: what the router reads as well."""
    with tape.recomputed(setup.recomputes("shared_experts"), "shared_experts"):
        x = normed
        if setup.training.moe_shared_expert_overlap:
            # gathered before the product, which then keeps all of it
            whole = setup.if_split(setup.tokens * setup.model.hidden * setup.element)
            x = tape.tensor("gathered tokens", whole)
            tape.add("shared_experts", [normed], [x])
        out = _two_linears(
            tape, setup, x, setup.experts.shared_ffn, "shared_experts", keeps_original=True
        )
        if not setup.experts.shared_gate:
            return out
        score = tape.tensor("gate score", setup.shard * setup.element)
        gated = tape.tensor("gated shared output", setup.hidden_shard)
        tape.add("shared_experts", [normed], [score], [normed])
        tape.add("shared_experts", [out, score], [gated], [out, score])
    return gated


def mlp_norm(tape: Tape, setup: Setup, hidden: Tensor) -> tuple[Tensor, Region]:
    """The norm before the MLP, where it is a module of its own, and the region to recompute it."""
    with (
        tape.offloaded(setup.offloads("mlp_norm")),
        tape.recomputed(setup.recomputes("layernorm"), "norms", discards=True) as region,
    ):
        out = norm(tape, setup, "norms", hidden, rows=setup.shard, width=setup.model.hidden)
    return out, region


def add_to_residual(tape: Tape, setup: Setup, out: Tensor, residual: Tensor) -> Tensor:
    """Bias, dropout, addition (fusions/fused_bias_dropout.py): dropout keeps its mask."""
    total = tape.tensor("hidden states", setup.hidden_shard)
    if setup.training.hidden_dropout:
        out = dropout(tape, setup, "residual", out, setup.shard * setup.model.hidden)
    tape.add("residual", [out, residual], [total], shares_gradient=True)
    return total


def activation(
    tape: Tape,
    setup: Setup,
    part: str,
    x: Tensor,
    elements: Number,
    probs: Tensor | None = None,
    pieces: Number = 1,
) -> Tensor:
    """The activation function.

    Fused, it keeps its input alone. Out of single operations, a gated one keeps the activated half
    and the other half, and weighting with probabilities keeps what it weights.

    Args:
        tape: to write on.
        setup: of the layer.
        part: for reports.
        x: what the first product wrote, both halves if gated.
        elements: of the result.
        probs: of each row, applied to the result.
        pieces: it runs on so many pieces, one after the other.
    """
    bytes = elements * setup.element
    out = tape.tensor("activated", bytes, pieces=pieces)
    if setup.training.bias_activation_fusion:
        reads = [x] if probs is None else [x, probs]
        tape.add(part, reads, [out], reads)
        return out
    plain = out if probs is None else tape.tensor("activated", bytes, pieces=pieces)
    if setup.model.gated:
        gate, up = x.view(bytes / pieces), x.view(bytes / pieces)
        gate_out, up_out = (
            tape.tensor(name, bytes, pieces=pieces) for name in ("activated gate", "shifted up")
        )
        tape.add(part, [x], [gate, up])
        tape.add(part, [gate], [gate_out], [gate])
        tape.add(part, [up], [up_out], shares_gradient=True)
        tape.add(part, [gate_out, up_out], [plain], [gate_out, up_out])
    else:
        tape.add(part, [x], [plain], [x])
    if probs is not None:
        in_fp32 = elements * FP32 if setup.training.moe_router_dtype else 0
        tape.add(
            part,
            [plain, probs],
            [out],
            [plain, probs],
            forward_extra=in_fp32 / pieces,
            backward_extra=2 * in_fp32 / pieces,
        )
    return out


def _two_linears(
    tape: Tape,
    setup: Setup,
    x: Tensor,
    ffn: int,
    part: str,
    *,
    norm_inside: bool = False,
    keeps_original: bool = False,
) -> Tensor:
    hidden, tp, model = setup.model.hidden, setup.sizes.tp, setup.model
    wide = ffn * (2 if model.gated else 1)
    whole = setup.if_split(setup.tokens * hidden * setup.element)
    first = tape.tensor("first product", setup.tokens * wide / tp * setup.element)
    if norm_inside:
        norm_linear(
            tape,
            setup,
            part,
            x,
            first,
            rows=setup.shard,
            width=hidden,
            weight=hidden * wide / tp,
            gathers=whole,
        )
    else:
        linear(
            tape,
            setup,
            part,
            x,
            first,
            inputs=setup.shard * hidden,
            weight=hidden * wide / tp,
            gathers=whole,
            keeps_original=keeps_original and setup.keeps_original_input,
        )
    if model.linear_bias and not setup.training.bias_activation_fusion:
        biased = tape.tensor("first product with bias", first.bytes)
        tape.add(part, [first], [biased], shares_gradient=True)
        first = biased
    activated = activation(tape, setup, part, first, setup.tokens * ffn / tp)
    out = tape.tensor("second product", setup.hidden_shard)
    linear(
        tape,
        setup,
        part,
        activated,
        out,
        inputs=setup.tokens * ffn / tp,
        weight=hidden * ffn / tp,
        scatters=whole,
    )
    return out
