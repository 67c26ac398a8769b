"""A MoE layer without its exchanges (router.py, token_dispatcher.py, experts.py of Megatron)."""

from dataclasses import replace

import numpy as np

from piper_megatron.layout.sizes import Number
from piper_megatron.platform.accelerator import Precision
from piper_megatron.resources.compute.setting import Operation, Setting
from piper_megatron.resources.kernels import Work, elementwise, linear

_MOE = frozenset({"moe"})
# bytes for each element of the output to which experts' biases are added, scaled by probabilities
# and so in fp32 (experts.py:TEGroupedMLP._apply_bias): product, sum, concatenation, conversion
_SCALED_BIAS_BYTES = (28, 36)
_UNFUSED_PERMUTE = 0.4  # rate of index_select and scatter_add over that of a fused permutation


def expert_operations(setting: Setting, *, imbalance: float) -> list[Operation]:
    """Everything between the norm and the residual stream.

    Args:
        setting: of the layer.
        imbalance: rows of the most loaded rank's experts over the mean.
    """
    rows = _routed_rows(setting, imbalance)
    products, activation = _experts(setting, rows)
    products += _padding(setting, rows)
    operations = [
        Operation("router", _router(setting), _MOE),
        Operation("permute", _permute(setting, rows), _MOE),
        Operation("experts", products, _MOE),
        Operation("experts", activation, _MOE | {"moe_act"}),
    ]
    if setting.experts.shared_ffn:
        shared = setting.mlp(setting.experts.shared_ffn / setting.sizes.tp)
        if setting.experts.shared_gate:
            elements = setting.rows * setting.model.hidden
            shared += setting.pointwise(3 * elements, 4 * elements, kernels=3)
        operations.append(Operation("shared_experts", shared, _MOE | {"shared_experts"}))
    return operations


def _routed_rows(setting: Setting, imbalance: float) -> Number:
    """Rows that the experts of the most loaded rank compute for a micro-batch."""
    experts = setting.experts
    load = imbalance
    if experts.capacity_factor is not None:
        padded = experts.pad_to_capacity
        load = experts.capacity_factor if padded else min(imbalance, experts.capacity_factor)
    return setting.local_rows * experts.topk * setting.sizes.etp * load


def _router(setting: Setting) -> Work:
    """The gate's product, scores, top-k and balancing loss (router.py, moe_utils.py)."""
    training, rows = setting.training, setting.local_rows
    # Transformer Engine's product takes 16-bit operands whatever the router's type is
    precision: Precision = training.precision
    if training.transformer_impl == "local" and training.moe_router_dtype:
        precision = "fp32"
    gate = linear(
        setting.accelerator,
        precision,
        rows,
        setting.model.hidden,
        setting.experts.count,
        gradient_bytes=setting.gradient_bytes,
    )
    passes, kernels = (6, 5) if training.moe_router_fusion else (16, 20)
    moved = 4 * rows * setting.experts.count * passes
    return gate + elementwise(setting.accelerator, moved, moved, kernels=kernels)


def _permute(setting: Setting, rows: Number) -> Work:
    """Copies of token rows around the exchange (moe_utils.py: permute, unpermute, sort_chunks)."""
    experts, training = setting.experts, setting.training
    own = setting.local_rows
    if training.dispatcher == "flex":
        # the exchange leaves each row once on a rank; HybridEP's kernels also copy it out
        moved: Number = 0 if training.flex_backend == "hybridep" else 4 * rows
        kernels = 4.0
    elif training.dispatcher == "allgather":
        moved = 3 * rows + own
        kernels = 10.0
    elif training.dispatcher in ("rail", "rbd"):
        # what goes to relays is copied by the exchange; rows are copied for experts, and added up
        moved = 2 * own + 4 * rows
        kernels = 14.0
    else:
        several = np.greater(experts.count // setting.sizes.ep, 1)
        moved = 2 * own * (1 + experts.topk) + np.where(several, 4 * rows, 0)
        kernels = 14.0
    slower = 1.0 if training.moe_permute_fusion else _UNFUSED_PERMUTE
    moved_bytes = training.element_bytes * (experts.latent or setting.model.hidden) * moved
    return elementwise(
        setting.accelerator,
        moved_bytes,
        moved_bytes,
        kernels=kernels / slower,
        efficiency=setting.accelerator.kernels.permute_efficiency * slower,
    )


def _padding(setting: Setting, rows: Number) -> Work:
    """Copies that align the rows of each expert for 8-bit products, and take the padding out.

    The router or HybridEP may have aligned them (moe_utils.py:skip_routed_expert_padding).
    """
    training, width = setting.training, setting.experts.latent or setting.model.hidden
    aligned = training.moe_router_padding_for_quantization or (
        training.dispatcher == "flex" and training.flex_backend in ("hybridep", "ncclep")
    )
    if aligned or not training.moe_grouped_gemm or setting.precision not in ("fp8", "fp4"):
        return Work()
    return setting.pointwise(4 * rows * width, 4 * rows * width, kernels=2)


def _experts(setting: Setting, rows: Number) -> tuple[Work, Work]:
    """Products and nonlinearity of the routed experts, and the projections of latent ones."""
    experts, sizes = setting.experts, setting.sizes
    matrices = 2 if setting.model.gated else 1
    width, hidden = experts.ffn / sizes.etp, experts.latent or setting.model.hidden
    local = experts.count / sizes.ep
    grouped = setting.training.moe_grouped_gemm

    def matrix(inputs: Number, outputs: Number) -> Work:
        return setting.linear(inputs, outputs, rows=rows, groups=local, grouped=grouped)

    products = matrix(hidden, matrices * width) + matrix(width, hidden)
    if setting.model.linear_bias and grouped:
        forward, backward = (moved * rows * hidden for moved in _SCALED_BIAS_BYTES)
        products += elementwise(setting.accelerator, forward, backward, kernels=4 * local)
    activation = setting.activation(rows * width)
    if not grouped:
        waits = (local - 1) * setting.accelerator.kernels.kernel_s
        activation = replace(
            activation,
            forward_s=activation.forward_s + waits,
            backward_s=activation.backward_s + waits,
            forward_launches=activation.forward_launches * local,
            backward_launches=activation.backward_launches * local,
        )
    if experts.latent:
        own, outer = setting.local_rows, setting.model.hidden
        products += setting.linear(outer, hidden, rows=own)
        products += setting.linear(hidden, outer, rows=own)
    return products, activation
