"""Collectives: which ones a training step makes in which groups, and of how many bytes.

One list for all who need it: `traffic.py` sums it for the placement, `resources/communication.py`
prices it. Volumes assume balanced routing. Sizes may be arrays [layouts]; bytes are 0 in groups of
one member.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

import numpy as np

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.workload.spec import DTYPE_BYTES, Attention, Experts, ModelSpec, TrainingSpec


class Operation(Enum):
    """How an exchange moves its tensor.

    SEND_RECEIVE passes parts on to the neighbour in the group until everybody had all.
    """

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    SEND_RECEIVE = "send_receive"


Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Collective:
    """One collective of a layer (or head) and micro-batch.

    Attributes:
        part: what it serves: `attention`, `context`, `mlp`, `shared_experts`, `dispatch`,
            `combine`, `embedding`, `head`, `gradients`, `parameters`.
        kind: of group, a key of `grid.GROUPS`.
        operation: see `Operation`.
        tensor_bytes: of the tensor that a group's members have together; of an all-to-all, what one
            member holds.
        phase: pass in which it happens.
        behind: part of `resources/compute.py` whose work in the same pass runs meanwhile, and can
            hide it.
    """

    part: str
    kind: str
    operation: Operation
    tensor_bytes: Number
    phase: Phase
    behind: str | None = None

    def sent_bytes(self, members: Number) -> Number:
        """Bytes that a member of a ring, or of an all-to-all, sends: (n - 1) / n of the tensor.

        All-reduces send twice that (doi:10.1016/j.jpdc.2008.09.002).
        """
        rounds = 2 if self.operation is Operation.ALL_REDUCE else 1
        return rounds * (members - 1) / members * self.tensor_bytes


def layer_collectives(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, *, moe: bool
) -> list[Collective]:
    """Collectives of one layer and micro-batch.

    Args:
        model: gives the widths.
        training: chooses the collectives.
        sizes: of one or many layouts.
        moe: the layer has experts.
    """
    return [
        *_attention_collectives(model, training, sizes),
        *_context_collectives(model, training, sizes),
        *(_expert_collectives if moe else _mlp_collectives)(model, training, sizes),
    ]


def embedding_collectives(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes
) -> list[Collective]:
    """Collectives of the vocabulary-parallel input embedding and micro-batch.

    megatron/core/tensor_parallel/layers.py:VocabParallelEmbedding (0.19.2).
    """
    tensor = activation_bytes(training, sizes, model.hidden)
    if training.sequence_parallel:
        return [
            Collective("embedding", "tp", Operation.REDUCE_SCATTER, tensor, "forward"),
            Collective("embedding", "tp", Operation.ALL_GATHER, tensor, "backward"),
        ]
    return [Collective("embedding", "tp", Operation.ALL_REDUCE, tensor, "forward")]


def head_collectives(model: ModelSpec, training: TrainingSpec, sizes: Sizes) -> list[Collective]:
    """Collectives of the output layer and vocabulary-parallel loss of a micro-batch.

    megatron/core/tensor_parallel/cross_entropy.py, megatron/core/fusions/fused_cross_entropy.py
    (0.19.2): the maximum, the target's logit and the sum of exponentials of every token, the last
    two in one all-reduce when fused.
    """
    per_token = sizes.tokens * DTYPE_BYTES["fp32"]
    sums = [2 * per_token] if training.cross_entropy_loss_fusion else [per_token] * 2
    return [
        *_column_parallel(
            "head", training, activation_bytes(training, sizes, model.hidden), "logits"
        ),
        *(
            Collective("head", "tp", Operation.ALL_REDUCE, tensor, "forward")
            for tensor in [per_token, *sums]
        ),
    ]


def boundary_bytes(model: ModelSpec, training: TrainingSpec, sizes: Sizes) -> Number:
    """What a rank sends over a pipeline boundary for a micro-batch, in each direction.

    megatron/core/pipeline_parallel/schedules.py:get_tensor_shapes (0.19.2): without sequence
    parallelism every tensor-parallel rank sends the whole activation.
    """
    whole = activation_bytes(training, sizes, model.hidden)
    return whole / sizes.tp if training.sequence_parallel else whole


def gradient_collectives(
    training: TrainingSpec, dense_elements: Number, expert_elements: Number
) -> list[Collective]:
    """Collectives of a step among data-parallel replicas.

    megatron/core/distributed/param_and_grad_buffer.py (0.19.2). The distributed optimizer
    reduce-scatters gradients and gathers parameters; otherwise gradients are all-reduced. Parts are
    `gradients` and `parameters`.

    Args:
        training: chooses the collectives and the formats.
        dense_elements: parameters of a rank that are no routed expert's.
        expert_elements: of the routed experts.
    """
    sharded = training.use_distributed_optimizer or training.fsdp == "torch"
    collectives = []
    for kind, elements in (("dp", dense_elements), ("edp", expert_elements)):
        gradients = elements * DTYPE_BYTES[training.main_grads_dtype]
        if not sharded:
            reduction = Operation.ALL_REDUCE
        else:
            reduction = Operation.REDUCE_SCATTER
            parameters = elements * gathered_parameter_bytes(training)
            collectives.append(
                Collective(
                    "parameters",
                    kind,
                    Operation.ALL_GATHER,
                    parameters,
                    "forward",
                    "first forward" if training.overlap_param_gather else None,
                )
            )
        behind = "last backward" if training.overlap_grad_reduce else None
        collectives.append(Collective("gradients", kind, reduction, gradients, "backward", behind))
    return collectives


def replicated_parameters(model: ModelSpec) -> int:
    """Weights of all layers whose gradients sequence-parallel ranks add up.

    finalize_model_grads.py:_allreduce_non_tensor_model_parallel_grads (0.19.2): norms, routers, and
    the down projections of MLA. Small vectors beside them are left out.
    """
    hidden, latent = model.hidden, model.attention.latent
    norms = 2 * hidden * (2 if model.norm == "LayerNorm" else 1)
    down = 0
    if latent:
        down = hidden * ((latent.q_rank or 0) + latent.kv_rank + latent.rope_head_dim)
    routers = sum(model.moe_layers) * hidden * model.experts.count if model.experts else 0
    return model.layers * (norms + down) + routers


def gathered_parameter_bytes(training: TrainingSpec) -> int:
    """Bytes of a parameter that is gathered.

    MXFP8 is quantised after the gather (param_and_grad_buffer.py:_post_param_sync, 0.19.2).
    """
    if training.fp8_param_gather and training.fp8_recipe != "mxfp8":
        return DTYPE_BYTES["fp8"]
    return training.element_bytes


def activation_bytes(training: TrainingSpec, sizes: Sizes, width: Number) -> Number:
    """A [tokens, width] tensor of a micro-batch, as a whole tensor-parallel group holds it."""
    return sizes.tokens * width * training.element_bytes


def routed_rows(experts: Experts, sizes: Sizes, imbalance: float = 1.0) -> Number:
    """Copies of a rank's own tokens that leave for experts; tensor-parallel ranks own 1 / TP each.

    megatron/core/transformer/moe/moe_utils.py (0.19.2): an expert takes at most its capacity, and
    exactly that where rows are padded to it.

    Args:
        experts: top-k and capacity.
        sizes: of one or many layouts.
        imbalance: load of the busiest rank over the mean, for the rows that it gets.
    """
    load = imbalance
    if experts.capacity_factor is not None:
        padded = experts.pad_to_capacity
        load = experts.capacity_factor if padded else min(load, experts.capacity_factor)
    return sizes.tokens / sizes.tp * experts.topk * load


def row_bytes(model: ModelSpec, training: TrainingSpec) -> int:
    """Bytes of a routed copy of a token."""
    assert model.experts is not None
    return (model.experts.latent or model.hidden) * training.element_bytes


def _summed_row_bytes(model: ModelSpec, training: TrainingSpec) -> int:
    """Bytes of a row that is reduce-scattered: Megatron adds in the type of the probabilities."""
    return row_bytes(model, training) // training.element_bytes * probability_bytes(training)


def probability_bytes(training: TrainingSpec) -> int:
    """Bytes of the weight that a token gives an expert: `--moe-router-dtype`, or activations'."""
    return {"fp32": 4, "fp64": 8, None: training.element_bytes}[training.moe_router_dtype]


def _column_parallel(
    part: str, training: TrainingSpec, tensor_bytes: Number, products: str | None = None
) -> list[Collective]:
    """Around a linear layer that is split by columns, whose computation is `products` or `part`.

    megatron/core/tensor_parallel/layers.py:LinearWithGradAccumulationAndAsyncCommunication
    (0.19.2), and Transformer Engine alike: with sequence parallelism the input is gathered, and
    gathered again for the weight gradient while the input's gradient is computed, which is then
    reduce-scattered while the weight gradient is computed (arXiv:2205.05198, section 4.2.2).
    """
    products = products or part
    if not training.sequence_parallel:
        return [Collective(part, "tp", Operation.ALL_REDUCE, tensor_bytes, "backward", products)]
    behind = products if training.tp_comm_overlap else None
    return [
        Collective(part, "tp", Operation.ALL_GATHER, tensor_bytes, "forward", behind),
        Collective(part, "tp", Operation.ALL_GATHER, tensor_bytes, "backward", products),
        Collective(part, "tp", Operation.REDUCE_SCATTER, tensor_bytes, "backward", products),
    ]


def _row_parallel(
    part: str, training: TrainingSpec, tensor_bytes: Number, products: str | None = None
) -> list[Collective]:
    """Around a linear layer that is split by rows; see `_column_parallel`."""
    if not training.sequence_parallel:
        return [Collective(part, "tp", Operation.ALL_REDUCE, tensor_bytes, "forward")]
    behind = (products or part) if training.tp_comm_overlap else None
    return [
        Collective(part, "tp", Operation.REDUCE_SCATTER, tensor_bytes, "forward", behind),
        Collective(part, "tp", Operation.ALL_GATHER, tensor_bytes, "backward", behind),
    ]


def _attention_collectives(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes
) -> list[Collective]:
    """Tensor parallelism around attention.

    MLA gathers its low-rank projections in place of the layer's input, and the rotary keys
    (megatron/core/transformer/multi_latent_attention.py, 0.19.2, with Transformer Engine).
    """
    latent = model.attention.latent
    width = model.hidden
    if latent:
        width = (latent.q_rank or model.hidden) + latent.kv_rank + latent.rope_head_dim
    return [
        *_column_parallel(
            "attention", training, activation_bytes(training, sizes, width), "projections"
        ),
        *_row_parallel(
            "attention", training, activation_bytes(training, sizes, model.hidden), "projections"
        ),
    ]


def _mlp_collectives(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, part: str = "mlp"
) -> list[Collective]:
    tensor = activation_bytes(training, sizes, model.hidden)
    return [*_column_parallel(part, training, tensor), *_row_parallel(part, training, tensor)]


def _context_collectives(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes
) -> list[Collective]:
    """Context parallelism, as Transformer Engine's `cp_comm_type` has it.

    `p2p` (arXiv:2310.01889, section 3): keys and values go round once forward, beside the
    attention; they and their gradients backward. `all_gather` gathers them, and reduce-scatters
    the gradients. `a2a` (arXiv:2309.14509, section 3) exchanges heads for tokens before and after
    the attention; `a2a+p2p` is taken as that.
    """
    query, key, value, output = (
        activation_bytes(training, sizes, width) for width in _head_widths(model.attention, sizes)
    )
    gathered = sizes.cp * (key + value)

    def collective(
        operation: Operation, tensor: Number, phase: Phase, behind: str | None = None
    ) -> Collective:
        return Collective("context", "cp", operation, tensor, phase, behind)

    match training.cp_comm_type.replace("_", ""):
        case "p2p":
            return [
                collective(Operation.SEND_RECEIVE, gathered, "forward", "attention"),
                collective(Operation.SEND_RECEIVE, 2 * gathered, "backward", "attention"),
            ]
        case "allgather":
            return [
                collective(Operation.ALL_GATHER, gathered, "forward"),
                collective(Operation.ALL_GATHER, gathered, "backward"),
                collective(Operation.REDUCE_SCATTER, gathered, "backward"),
            ]
    phases: tuple[Phase, ...] = ("forward", "backward")
    return [
        collective(Operation.ALL_TO_ALL, tensor, phase)
        for phase in phases
        for tensor in (query + key + value, output)
    ]


def _head_widths(attention: Attention, sizes: Sizes) -> tuple[Number, Number, Number, Number]:
    """Width of queries, keys, values and outputs on a tensor-parallel rank."""
    heads = attention.heads / sizes.tp
    if attention.latent:
        latent = attention.latent
        key = heads * (latent.qk_head_dim + latent.rope_head_dim)
        return key, key, heads * latent.v_head_dim, heads * latent.v_head_dim
    query = heads * attention.head_dim
    key = np.maximum(attention.groups / sizes.tp, 1) * attention.head_dim
    return query, key, key, query


def _expert_collectives(model: ModelSpec, training: TrainingSpec, sizes: Sizes) -> list[Collective]:
    """Collectives of a MoE layer's shared experts and dispatcher.

    megatron/core/transformer/moe/token_dispatcher.py (0.19.2). All dispatchers but `allgather` send
    every copy of a token to its expert's rank, as counted here, or fewer where they de-duplicate
    (resources/dispatch.py); ranks that share an expert (ETP) gather what the others received.
    """
    experts = model.experts
    assert experts is not None
    shared = _mlp_collectives(model, training, sizes, "shared_experts")
    if not experts.shared_ffn:
        shared = []
    elif training.moe_shared_expert_overlap:
        shared = [replace(each, behind="experts") for each in shared]
    if training.dispatcher == "allgather":
        return [*shared, *_gathered_tokens(model, training, sizes)]
    rows = routed_rows(experts, sizes)
    row, summed = row_bytes(model, training), _summed_row_bytes(model, training)
    # part, bytes in the expert-parallel and in the expert-tensor-parallel group
    tensors = [
        ("dispatch", rows * row, rows * row),
        ("dispatch", rows * probability_bytes(training), rows * probability_bytes(training)),
        ("combine", rows * row, rows * summed),
    ]
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    both: tuple[tuple[Phase, Operation, Operation], ...] = (
        ("forward", gather, scatter),
        ("backward", scatter, gather),
    )
    collectives = shared
    for part, exchanged, shared_out in tensors:
        for phase, after_dispatch, before_combine in both:
            operation = after_dispatch if part == "dispatch" else before_combine
            collectives += [
                Collective(part, "ep", Operation.ALL_TO_ALL, exchanged, phase),
                Collective(part, "etp", operation, sizes.etp * shared_out, phase),
            ]
    return collectives


def _gathered_tokens(model: ModelSpec, training: TrainingSpec, sizes: Sizes) -> list[Collective]:
    """All tokens, their probabilities and routing map go to all ranks of the tp-ep group."""
    experts = model.experts
    assert experts is not None
    tokens = sizes.tokens / sizes.tp * sizes.etp * sizes.ep
    rows = tokens * row_bytes(model, training)
    summed = tokens * _summed_row_bytes(model, training)
    probabilities = tokens * experts.count * probability_bytes(training)
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    listed: list[tuple[str, Operation, Number, Phase]] = [
        ("dispatch", gather, tokens * experts.count, "forward"),
        ("dispatch", gather, probabilities, "forward"),
        ("dispatch", gather, rows, "forward"),
        ("combine", scatter, summed, "forward"),
        ("combine", gather, summed, "backward"),
        ("dispatch", scatter, rows, "backward"),
        ("dispatch", scatter, probabilities, "backward"),
    ]
    return [Collective(part, "tp_ep", op, tensor, phase) for part, op, tensor, phase in listed]


def dense_parameters(model: ModelSpec) -> int:
    """Weights of all layers' matrices, embedding and output layer, without routed experts.

    Norms and biases, under 0.1%, are left out; `resources/parameters.py` counts exactly.
    """
    hidden, experts = model.hidden, model.experts
    matrices = 3 if model.gated else 2
    mlp = matrices * hidden * model.ffn
    moe = 0
    if experts:
        moe = hidden * (experts.count + matrices * experts.shared_ffn + 2 * (experts.latent or 0))
    moe_layers = sum(model.moe_layers)
    return (
        model.layers * _attention_parameters(model)
        + (model.layers - moe_layers) * mlp
        + moe_layers * moe
        + 2 * model.vocab * hidden
    )


def expert_parameters(model: ModelSpec) -> int:
    """Weights of all routed experts of all layers."""
    experts = model.experts
    if experts is None:
        return 0
    width = experts.latent or model.hidden
    one = (3 if model.gated else 2) * width * experts.ffn
    return sum(model.moe_layers) * experts.count * one


def _attention_parameters(model: ModelSpec) -> int:
    attention, hidden = model.attention, model.hidden
    latent, heads = attention.latent, attention.heads
    if latent is None:
        query = heads * (2 if attention.output_gate else 1)
        return hidden * attention.head_dim * (query + heads + 2 * attention.groups)
    query_width = heads * (latent.qk_head_dim + latent.rope_head_dim)
    query = latent.q_rank * (hidden + query_width) if latent.q_rank else hidden * query_width
    down = hidden * (latent.kv_rank + latent.rope_head_dim)
    up = latent.kv_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
    return query + down + up + heads * latent.v_head_dim * hidden
