"""Compute time of a layer, of the output head and of the optimizer step, on one rank.

The operations are those of Megatron-Core 0.19.2 (`transformer/`: attention.py,
multi_latent_attention.py, moe/*.py, mlp.py; `core/tensor_parallel/cross_entropy.py`), the curves
those of the accelerator. Nothing here waits for another rank: `communication.py` has that.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.platform.accelerator import Accelerator, Precision
from piper_megatron.resources.kernels import (
    Work,
    elementwise,
    fused_attention,
    linear,
    memory_s,
    product_s,
)
from piper_megatron.workload.spec import DTYPE_BYTES, ModelSpec, TrainingSpec

# bytes moved to quantise an element of an operand, for its use in two products: read, and write
# with and without transposing; per-tensor scaling of the current tensor reads it twice
_CAST_BYTES = {"delayed": 4.0, "tensorwise": 6.0, "blockwise": 4.0, "mxfp8": 4.0}
_CAST_BYTES_FP4 = 5.0  # with a Hadamard transform of the columns
_UNFUSED = 2.5  # traffic of a chain of elementwise kernels over that of a fused one
_UNFUSED_PERMUTE = (
    0.4  # efficiency of index_select and scatter_add over that of a fused permutation
)
# what a graph of each scope covers (transformer_config.py: cuda_graph_scope)
_GRAPH_PARTS = {
    "attn": {"norms", "projections", "attention"},
    "mlp": {"mlp"},
    "moe": {"router", "permute", "experts", "shared_experts"},
    "moe_router": {"router", "shared_experts"},
    "moe_preprocess": set(),
}


@dataclass(frozen=True)
class _Operation:
    """A part of a layer's work, and the recomputed modules that repeat it."""

    part: str
    work: Work
    modules: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Layer:
    """Everything that the operations of a layer depend on."""

    model: ModelSpec
    training: TrainingSpec
    sizes: Sizes
    accelerator: Accelerator

    @property
    def rows(self) -> Number:
        """Tokens of a micro-batch that attention and MLPs of a rank see."""
        return self.sizes.tokens

    @property
    def local_rows(self) -> Number:
        """Tokens of the residual stream of a rank."""
        return self.rows / self.sizes.tp if self.training.sequence_parallel else self.rows

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return self.training.element_bytes

    @property
    def precision(self) -> Precision:
        """Of the large matrix products."""
        if self.training.fp4:
            return "fp4"
        return "fp8" if self.training.fp8 else self.training.precision

    @property
    def gradient_bytes(self) -> int:
        """Of an element of a gradient buffer."""
        return DTYPE_BYTES[self.training.main_grads_dtype]

    def linear(
        self,
        inputs: Number,
        outputs: Number,
        *,
        rows: Number | None = None,
        groups: Number = 1,
        grouped: bool = False,
        launches: float = 3,
    ) -> Work:
        """A linear layer in the precision of the large products."""
        cast = 0.0
        if self.precision == "fp4":
            cast = _CAST_BYTES_FP4
        elif self.precision == "fp8":
            cast = _CAST_BYTES.get(self.training.fp8_recipe, _CAST_BYTES["tensorwise"])
        return linear(
            self.accelerator,
            self.precision,
            self.rows if rows is None else rows,
            inputs,
            outputs,
            groups=groups,
            grouped=grouped,
            gradient_bytes=self.gradient_bytes,
            cast_bytes=cast,
            launches=launches + (3 if cast else 0),
        )

    def pointwise(
        self, forward: Number, backward: Number, *, fused: bool = True, kernels: float = 1
    ) -> Work:
        """Elementwise kernels, by the elements that they read and write."""
        more = 1.0 if fused else _UNFUSED
        scale = self.element * more
        return elementwise(
            self.accelerator, scale * forward, scale * backward, kernels=kernels * more
        )


def layer_compute(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    accelerator: Accelerator,
    *,
    moe: bool,
    windowed: bool = False,
    imbalance: float = 1.0,
) -> dict[str, Work]:
    """Work of one transformer layer for one micro-batch, by part.

    Args:
        model: what is trained.
        training: precision, kernels, recomputation.
        sizes: one layout, or arrays of them.
        accelerator: curves and peaks.
        moe: the layer has experts.
        windowed: its attention sees a window.
        imbalance: rows of the most loaded rank's experts over the mean.

    Returns:
        norms, projections, attention, and mlp or router, permute, experts, shared_experts. With
        full recomputation all forward work is repeated; a layer that is spared (`block`) is that
        of a training without recomputation.

    Raises:
        PlatformError: the accelerator lacks the precision.
    """
    layer = _Layer(model, training, sizes, accelerator)
    operations = [*_norms(layer, moe), *_attention(layer, windowed)]
    operations += _moe(layer, imbalance) if moe else _mlp(layer)
    parts: dict[str, Work] = {}
    for operation in operations:
        work = _recomputed(operation, training)
        parts[operation.part] = parts.get(operation.part, Work()) + work
    graphed = _graphed(training, parts)
    return {name: work.replayed() if name in graphed else work for name, work in parts.items()}


def _recomputed(operation: _Operation, training: TrainingSpec) -> Work:
    chosen = frozenset(training.recompute_modules)
    if training.recompute_granularity == "full" or (
        training.recompute_granularity == "selective" and operation.modules & chosen
    ):
        return operation.work.repeated_in_backward()
    return operation.work


def _graphed(training: TrainingSpec, parts: Iterable[str]) -> set[str]:
    """Parts whose kernels CUDA graphs launch."""
    if training.cuda_graph_impl == "none":
        return set()
    if training.cuda_graph_impl == "full_iteration" or not training.cuda_graph_scope:
        return set(parts)
    return set().union(*(_GRAPH_PARTS.get(scope, set()) for scope in training.cuda_graph_scope))


def _norms(layer: _Layer, moe: bool) -> list[_Operation]:
    """Two norms, two additions to the residual stream, and that of the shared experts' output."""
    elements = layer.local_rows * layer.model.hidden
    norms = layer.pointwise(2 * 2 * elements, 2 * 4 * elements, kernels=2)
    shared = moe and layer.model.experts is not None and layer.model.experts.shared_ffn > 0
    additions = 3 if shared else 2
    residual = layer.pointwise(
        additions * 3 * elements,
        additions * 2 * elements,
        fused=layer.training.bias_dropout_fusion,
        kernels=additions,
    )
    return [
        _Operation("norms", norms, frozenset({"layernorm"})),
        _Operation("norms", residual),
    ]


def _attention(layer: _Layer, windowed: bool) -> list[_Operation]:
    latent = layer.model.attention.latent is not None
    projections = _latent_projections(layer) if latent else _grouped_projections(layer)
    core = _Operation("attention", _core_attention(layer, windowed), frozenset({"core_attn"}))
    return [*projections, core]


def _grouped_projections(layer: _Layer) -> list[_Operation]:
    """QKV and output projection, rotary embedding, norms of queries and keys."""
    attention, tp = layer.model.attention, layer.sizes.tp
    queries = attention.heads * attention.head_dim / tp
    # a key-value head is repeated when there are more ranks than heads
    keys = np.maximum(attention.groups / tp, 1) * attention.head_dim
    gate = queries if attention.output_gate else 0
    rows, hidden = layer.rows, layer.model.hidden
    products = layer.linear(hidden, queries + 2 * keys + gate) + layer.linear(queries, hidden)
    # the queries are copied out of the common projection, and all gradients back into it
    copies = layer.pointwise(2 * rows * queries, 2 * rows * (queries + 2 * keys), kernels=1)
    turned = rows * (queries + keys)
    extra = copies
    if layer.model.position in ("rope", "yarn", "mrope"):
        extra += layer.pointwise(
            2 * turned, 2 * turned, fused=layer.training.apply_rope_fusion, kernels=2
        )
    if attention.qk_norm:
        extra += layer.pointwise(2 * turned, 4 * turned, kernels=2)
    if attention.output_gate:
        extra += layer.pointwise(3 * rows * queries, 5 * rows * queries, kernels=2)
    return [_Operation("projections", products), _Operation("projections", extra)]


def _latent_projections(layer: _Layer) -> list[_Operation]:
    """Down and up projections of multi-latent attention, and the assembly of queries and keys."""
    latent = layer.model.attention.latent
    assert latent is not None
    hidden, rows = layer.model.hidden, layer.rows
    heads = layer.model.attention.heads / layer.sizes.tp
    query_dim = latent.qk_head_dim + latent.rope_head_dim
    query, key_value = heads * query_dim, heads * (latent.qk_head_dim + latent.v_head_dim)
    # every tensor-parallel rank projects its own tokens down
    down = layer.linear(hidden, latent.kv_rank + latent.rope_head_dim, rows=layer.local_rows)
    up = layer.linear(latent.kv_rank, key_value)
    norms = latent.kv_rank
    if latent.q_rank is None:
        down += layer.linear(hidden, query)
    else:
        down += layer.linear(hidden, latent.q_rank, rows=layer.local_rows)
        up += layer.linear(latent.q_rank, query)
        norms += latent.q_rank
    assembled = rows * (2 * query + heads * (2 * latent.qk_head_dim + 2 * latent.v_head_dim))
    up += layer.pointwise(assembled, assembled, fused=layer.training.apply_rope_fusion, kernels=4)
    if layer.model.attention.qk_norm:
        up += layer.pointwise(2 * rows * norms, 4 * rows * norms, kernels=2)
    output = layer.linear(heads * latent.v_head_dim, hidden)
    return [
        _Operation("projections", down),
        _Operation("projections", up, frozenset({"mla_up_proj"})),
        _Operation("projections", output),
    ]


def _core_attention(layer: _Layer, windowed: bool) -> Work:
    attention, sizes = layer.model.attention, layer.sizes
    heads = attention.heads / sizes.tp
    if attention.latent is None:
        query_dim = value_dim = attention.head_dim
    else:
        query_dim = attention.latent.qk_head_dim + attention.latent.rope_head_dim
        value_dim = attention.latent.v_head_dim
    if keeps_scores(layer.training):
        return _unfused_attention(layer, heads, query_dim + value_dim)
    seen = sizes.seq / 2
    if windowed and attention.window is not None and attention.window < sizes.seq:
        seen = attention.window * (1 - attention.window / (2 * sizes.seq))
    work = fused_attention(layer.accelerator, layer.rows, seen, heads, max(query_dim, value_dim))
    # a ring of context-parallel ranks takes the keys in turn, and merges the partial results
    turns = sizes.cp - 1
    merged = turns * layer.rows * heads * value_dim
    ring = layer.pointwise(3 * merged, 3 * merged, kernels=0)
    fixed_s = turns * layer.accelerator.attention.kernel_s
    more = Work(
        forward_s=fixed_s,
        backward_s=fixed_s,
        forward_launches=6 * turns,
        backward_launches=6 * turns,
    )
    return work + ring + more


def keeps_scores(training: TrainingSpec) -> bool:
    """Whether attention writes its scores to memory: Megatron's own kernel, or TE's unfused one."""
    return training.transformer_impl == "local" or training.attention_backend in (
        "unfused",
        "local",
    )


def _unfused_attention(layer: _Layer, heads: Number, dims: int) -> Work:
    """Scores, softmax and weighted values as batched products (dot_product_attention.py)."""
    training, accelerator = layer.training, layer.accelerator
    scores = layer.rows * layer.sizes.seq * heads
    flops = 2 * scores * dims
    moved = layer.element * 2 * scores
    forward = product_s(accelerator, training.precision, flops, moved)
    softmax_in_fp32 = training.attention_softmax_in_fp32 or not training.masked_softmax_fusion
    softmax = 2 * scores * (2.5 if softmax_in_fp32 else 1)
    dropout = 2.5 * scores if training.attention_dropout > 0 else 0
    products = Work(
        forward_s=forward,
        backward_s=2 * forward,
        forward_launches=3,
        backward_launches=6,
    )
    return products + layer.pointwise(softmax + dropout, 1.5 * softmax + dropout, kernels=3)


def _activation(layer: _Layer, elements: Number) -> Work:
    """The nonlinearity between two matrices, by the elements that it puts out.

    A gated one reads two for each; gradients read and write those and the gradient once more.
    """
    read = 2 if layer.model.gated else 1
    return layer.pointwise(
        (read + 1) * elements,
        (2 * read + 1) * elements,
        fused=layer.training.bias_activation_fusion,
    )


def _dense_mlp(layer: _Layer, width: Number, rows: Number) -> Work:
    matrices = 2 if layer.model.gated else 1
    hidden = layer.model.hidden
    return (
        layer.linear(hidden, matrices * width, rows=rows)
        + layer.linear(width, hidden, rows=rows)
        + _activation(layer, rows * width)
    )


def _mlp(layer: _Layer) -> list[_Operation]:
    work = _dense_mlp(layer, layer.model.ffn / layer.sizes.tp, layer.rows)
    return [_Operation("mlp", work, frozenset({"mlp"}))]


def _moe(layer: _Layer, imbalance: float) -> list[_Operation]:
    experts = layer.model.experts
    assert experts is not None, "ModelSpec checks it"
    rows = routed_rows(layer.model, layer.training, layer.sizes, imbalance)
    products, activation = _experts(layer, rows)
    operations = [
        _Operation("router", _router(layer), frozenset({"moe"})),
        _Operation("permute", _permute(layer, rows), frozenset({"moe"})),
        _Operation("experts", products, frozenset({"moe"})),
        _Operation("experts", activation, frozenset({"moe", "moe_act"})),
    ]
    if experts.shared_ffn:
        work = _dense_mlp(layer, experts.shared_ffn / layer.sizes.tp, layer.rows)
        if experts.shared_gate:
            elements = layer.rows * layer.model.hidden
            work += layer.pointwise(3 * elements, 4 * elements, kernels=3)
        modules = frozenset({"moe", "shared_experts"})
        operations.append(_Operation("shared_experts", work, modules))
    return operations


def routed_rows(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, imbalance: float = 1.0
) -> Number:
    """Rows that the experts of the most loaded rank compute for a micro-batch."""
    experts = model.experts
    assert experts is not None
    local = sizes.tokens / sizes.tp if training.sequence_parallel else sizes.tokens
    load = imbalance
    if experts.capacity_factor is not None:
        padded = experts.pad_to_capacity
        load = experts.capacity_factor if padded else min(imbalance, experts.capacity_factor)
    return local * experts.topk * sizes.etp * load


def _router(layer: _Layer) -> Work:
    """The gate's product, scores, top-k and balancing loss (moe/router.py, moe_utils.py)."""
    experts, training = layer.model.experts, layer.training
    assert experts is not None
    rows = layer.local_rows
    # with Transformer Engine the product takes 16-bit operands whatever the router's type is
    precision = training.precision
    if training.transformer_impl == "local" and training.moe_router_dtype:
        precision = "fp32"
    gate = linear(
        layer.accelerator,
        precision,
        rows,
        layer.model.hidden,
        experts.count,
        gradient_bytes=layer.gradient_bytes,
    )
    passes = 6 if training.moe_router_fusion else 16
    moved = 4 * rows * experts.count * passes
    kernels = 5 if training.moe_router_fusion else 20
    return gate + elementwise(layer.accelerator, moved, moved, kernels=kernels)


def _permute(layer: _Layer, rows: Number) -> Work:
    """Copies of token rows around the exchange (moe_utils.py: permute, unpermute, sort_chunks)."""
    experts, training = layer.model.experts, layer.training
    assert experts is not None
    width = experts.latent or layer.model.hidden
    own, copies = layer.local_rows, layer.local_rows * experts.topk
    if training.dispatcher == "flex":
        # the exchange itself de-duplicates; HybridEP's kernels also permute
        moved = 0 if training.flex_backend == "hybridep" else 4 * rows
        kernels = 4.0
    elif training.dispatcher == "allgather":
        moved = 3 * rows + own
        kernels = 10.0
    else:
        sorts = np.where(np.greater(experts.count // layer.sizes.ep, 1), 4 * rows, 0)
        moved = 2 * (own + copies) + sorts
        kernels = 14.0
    fused = training.moe_permute_fusion
    efficiency = layer.accelerator.kernels.permute_efficiency * (1 if fused else _UNFUSED_PERMUTE)
    moved_bytes = layer.element * width * moved
    return elementwise(
        layer.accelerator,
        moved_bytes,
        moved_bytes,
        kernels=kernels * (1 if fused else 2),
        efficiency=efficiency,
    )


def _experts(layer: _Layer, rows: Number) -> tuple[Work, Work]:
    """Products and nonlinearity of the routed experts (moe/experts.py)."""
    experts, sizes = layer.model.experts, layer.sizes
    assert experts is not None
    matrices = 2 if layer.model.gated else 1
    width = experts.ffn / sizes.etp
    hidden = experts.latent or layer.model.hidden
    local = experts.count / sizes.ep
    grouped = layer.training.moe_grouped_gemm

    def expert(inputs: Number, outputs: Number) -> Work:
        return layer.linear(inputs, outputs, rows=rows, groups=local, grouped=grouped)

    products = expert(hidden, matrices * width) + expert(width, hidden)
    if grouped:
        # one call in Python, but one kernel for each expert
        products = replace(
            products,
            forward_launches=products.forward_launches + local,
            backward_launches=products.backward_launches + 2 * local,
        )
    if experts.latent:
        for inputs, outputs in ((layer.model.hidden, hidden), (hidden, layer.model.hidden)):
            products += layer.linear(inputs, outputs, rows=layer.local_rows)
    activation = _activation(layer, rows * width)
    if not grouped:
        loop = local - 1
        activation = replace(
            activation,
            forward_s=activation.forward_s + loop * layer.accelerator.kernels.kernel_s,
            backward_s=activation.backward_s + loop * layer.accelerator.kernels.kernel_s,
            forward_launches=activation.forward_launches * local,
            backward_launches=activation.backward_launches * local,
        )
    return products, activation


def embedding_compute(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, accelerator: Accelerator
) -> Work:
    """Work of the input embedding for one micro-batch: rows are gathered, and gradients added."""
    layer = _Layer(model, training, sizes, accelerator)
    elements = layer.rows * model.hidden
    backward = elements * (layer.element + 2 * layer.gradient_bytes)
    return elementwise(
        accelerator,
        2 * layer.element * elements,
        backward,
        kernels=4,
        efficiency=accelerator.kernels.permute_efficiency,
    )


def head_compute(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, accelerator: Accelerator
) -> dict[str, Work]:
    """Work of the last norm, the output layer and the cross entropy for one micro-batch.

    Each depth of multi-token prediction has one of its own.
    """
    layer = _Layer(model, training, sizes, accelerator)
    vocab = model.padded_vocab(1) / sizes.tp
    elements = layer.local_rows * model.hidden
    norm = layer.pointwise(2 * elements, 4 * elements)
    logits = linear(
        accelerator,
        training.precision,
        layer.rows,
        model.hidden,
        vocab,
        gradient_bytes=layer.gradient_bytes,
    )
    return {"logits": norm + logits, "loss": _cross_entropy(layer, layer.rows * vocab)}


def _cross_entropy(layer: _Layer, logits: Number) -> Work:
    """Passes over the logits.

    Unfused, Megatron converts to fp32 (6 bytes an element) and reads or writes fp32 eight times
    more; backward scales the kept softmax and converts it back. TE's kernel takes a running
    softmax and leaves the gradient in place; the fusion with the output layer keeps nothing, and
    repeats the product.
    """
    training = layer.training
    passes = {"forward": 38.0, "backward": 14.0, "kernels": 10.0}
    if training.cross_entropy_loss_fusion:
        passes = {"forward": 26.0, "backward": 14.0, "kernels": 4.0}
        if training.cross_entropy_fusion_impl != "native":
            passes = {"forward": 6.0, "backward": 4.0, "kernels": 2.0}
    work = elementwise(
        layer.accelerator,
        passes["forward"] * logits,
        passes["backward"] * logits,
        kernels=passes["kernels"],
        efficiency=layer.accelerator.kernels.loss_efficiency,
    )
    if training.cross_entropy_loss_fusion and training.cross_entropy_fusion_impl == "linear":
        flops = 2 * logits * layer.model.hidden
        again = product_s(layer.accelerator, training.precision, flops, 0)
        work = replace(work, recompute_s=again)
    return work


def prediction_compute(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, accelerator: Accelerator
) -> Work:
    """Work that a multi-token-prediction layer has beside its transformer layer and its head.

    Two norms, and a projection from twice the hidden size (multi_token_prediction.py).
    """
    layer = _Layer(model, training, sizes, accelerator)
    elements = layer.local_rows * model.hidden
    return layer.pointwise(6 * elements, 10 * elements, kernels=3) + layer.linear(
        2 * model.hidden, model.hidden / sizes.tp
    )


def optimizer_seconds(
    training: TrainingSpec,
    accelerator: Accelerator,
    *,
    held: Number,
    updated: Number,
) -> Number:
    """Time of gradient norm, Adam step and zeroing of the gradients.

    Args:
        training: optimizer, its types and its offload.
        accelerator: bandwidths of device, host and the link between them.
        held: parameters of this rank.
        updated: those whose states it keeps; fewer than `held` with a distributed optimizer.
    """
    gradient = DTYPE_BYTES[training.main_grads_dtype]
    main = DTYPE_BYTES[training.main_params_dtype]
    moments = DTYPE_BYTES[training.exp_avg_dtype] + DTYPE_BYTES[training.exp_avg_sq_dtype]
    if training.optimizer == "sgd":
        moments = 4
    weight = training.element_bytes if training.precision != "fp32" else 0
    # norm, clipping and step read gradients; states are read and written
    per_parameter = 3 * gradient + 2 * (main + moments) + weight
    offloaded = training.optimizer_offload_fraction if training.optimizer_cpu_offload else 0.0
    efficiency = accelerator.kernels.efficiency
    on_device = memory_s(
        accelerator, (1 - offloaded) * updated * per_parameter + held * gradient, efficiency
    )
    host = accelerator.host
    # gradients go to the host, weights come back, Adam runs in between on the host's memory
    on_host = (
        offloaded
        * updated
        * (per_parameter / host.optimizer_gbps + (gradient + max(weight, 2)) / host.link_gbps)
        / 1e9
    )
    return on_device + on_host + host.step_s
