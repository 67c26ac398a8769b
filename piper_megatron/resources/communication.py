"""What the collectives of a training step cost, and what can hide them.

Volumes are those of `layout/collectives.py` and `dispatch.py`, prices those of `network.py`. Every
exchange says how long it keeps its links busy and which computation runs meanwhile in Megatron;
composing both into a step is for `step.py`. Sizes may be arrays [layouts].
"""

from dataclasses import replace

from piper_megatron.layout.collectives import (
    Phase,
    boundary_bytes,
    embedding_collectives,
    head_collectives,
    layer_collectives,
    routed_rows,
    row_bytes,
)
from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.dispatch import Ways, dispatch_cost
from piper_megatron.resources.exchange import (
    Compute,
    Exchange,
    Pass,
    Priced,
    Pricing,
    exchange_of,
)
from piper_megatron.resources.network import message_cost
from piper_megatron.resources.reach import Order, members_at_levels
from piper_megatron.resources.replicas import step_communication
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

__all__ = [
    "Exchange",
    "Order",
    "Pass",
    "boundary_seconds",
    "embedding_communication",
    "head_communication",
    "layer_communication",
    "step_communication",
]

_BEFORE_DISPATCH = ("norms", "projections", "attention", "shared_experts", "router")
_BETWEEN = ("permute", "experts")
_PASSES: tuple[Phase, ...] = ("forward", "backward")


def layer_communication(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    platform: Platform,
    *,
    moe: bool,
    imbalance: float = 1.0,
    order: Order = "megatron",
) -> dict[str, Exchange]:
    """Exchanges of one transformer layer for one micro-batch, by part.

    Args:
        model: what is trained.
        training: collectives, dispatcher, overlap, recomputation.
        sizes: one layout, or arrays of them.
        platform: levels and curves.
        moe: the layer has experts.
        imbalance: rows of the most loaded rank's experts over the mean.
        order: of the ranks on the devices.

    Returns:
        attention, context, and mlp or shared_experts, dispatch, combine. With full recomputation
        all forward exchanges are repeated; a layer that is spared (`block`) is that of a training
        without recomputation.
    """
    pricing = Pricing(platform, sizes, order)
    priced: list[Priced] = []
    load: Number = 1.0
    if model.experts:
        load = routed_rows(model.experts, sizes, imbalance) / routed_rows(model.experts, sizes)
    for collective in layer_collectives(model, training, sizes, moe=moe):
        if collective.kind == "ep" or (collective.kind == "etp" and training.dispatcher == "flex"):
            continue  # priced by the dispatcher below
        if collective.kind == "etp":
            collective = replace(collective, tensor_bytes=load * collective.tensor_bytes)
        priced.append(pricing.collective(collective, training))
    if moe and training.dispatcher != "allgather":
        priced += _dispatch(model, training, pricing, imbalance)
    return {
        part: exchange_of(platform, training, part, [each for each in priced if each.part == part])
        for part in dict.fromkeys(each.part for each in priced)
    }


def embedding_communication(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    platform: Platform,
    *,
    order: Order = "megatron",
) -> Exchange:
    """Exchanges of the input embedding for one micro-batch."""
    pricing = Pricing(platform, sizes, order)
    collectives = embedding_collectives(model, training, sizes)
    return exchange_of(
        platform, training, "embedding", [pricing.collective(c, training) for c in collectives]
    )


def head_communication(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    platform: Platform,
    *,
    order: Order = "megatron",
) -> Exchange:
    """Exchanges of an output layer and loss for one micro-batch."""
    pricing = Pricing(platform, sizes, order)
    collectives = head_collectives(model, training, sizes)
    return exchange_of(
        platform, training, "head", [pricing.collective(c, training) for c in collectives]
    )


def boundary_seconds(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    platform: Platform,
    *,
    order: Order = "megatron",
) -> Number:
    """Seconds of a micro-batch's activations over a pipeline boundary, the mean over boundaries.

    All ranks of a stage send at once, each with its share of the NICs; gradients take as long.
    """
    reach = members_at_levels(platform, sizes, "pp", order)
    return message_cost(platform, reach, boundary_bytes(model, training, sizes)).seconds


def _dispatch(
    model: ModelSpec, training: TrainingSpec, pricing: Pricing, imbalance: float
) -> list[Priced]:
    """Exchanges with the experts' ranks, by any dispatcher but `allgather`."""
    experts = model.experts
    assert experts is not None
    tokens = routed_rows(experts, pricing.sizes, imbalance) / experts.topk
    bytes_of_row = row_bytes(model, training)
    given = pricing.platform, training, experts
    if training.dispatcher == "flex":
        costs = [
            dispatch_cost(
                *given,
                pricing.reach("tp_ep"),
                tokens=tokens,
                row_bytes=bytes_of_row,
                copies=pricing.sizes.etp,
                probabilities=probabilities,
            )
            for probabilities in (True, False)
        ]
    else:
        ways = Ways.of(*given, pricing.reach("ep"), tokens=tokens, row_bytes=bytes_of_row)
        costs = [ways.exchange(probabilities=probabilities) for probabilities in (True, False)]
    priced = [
        Priced(part, phase, cost, _behind_dispatch(training, part, phase))
        for part, cost in zip(("dispatch", "combine"), costs, strict=True)
        for phase in _PASSES
    ]
    if training.dispatcher != "flex":
        # Piper's dispatchers plan once: runtime/dispatch/recall.py
        again = training.dispatcher == "alltoall"
        announcement = ways.announcement(pricing.reach("tp_ep"))
        priced.append(Priced("dispatch", "forward", announcement, repeated=again))
    return priced


def _behind_dispatch(training: TrainingSpec, part: str, phase: Phase) -> tuple[Compute, ...]:
    """What Megatron computes while tokens travel.

    megatron/core/models/common/model_chunk_schedule_plan.py:TransformerLayerSchedulePlan.run
    (0.19.2): one micro-batch's forward pass beside another's backward pass, in the steady phase of
    the schedule. Shared experts can run beside their own layer's exchanges instead.
    """
    if training.overlap_moe_expert_parallel_comm:
        other: Phase = "backward" if phase == "forward" else "forward"
        beside = _BETWEEN if part == "dispatch" else _BEFORE_DISPATCH
        behind: tuple[Compute, ...] = tuple((name, other) for name in beside)
        if training.delay_wgrad_compute and (part, phase) == ("dispatch", "backward"):
            behind += (("experts", "weight"),)
        return behind
    if training.moe_shared_expert_overlap:
        return (("shared_experts", phase),)
    return ()
