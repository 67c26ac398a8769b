"""Step time in closed form, for many layouts at once.

What `step.py` simulates, here from the stages that may be the slowest: a pipeline takes as long as
its slowest stage works, and once the passes of the others to fill and drain it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.resources.chunk_time import end_time, varied
from piper_megatron.resources.communication import Exchange, Pass, step_communication
from piper_megatron.resources.compute import optimizer_seconds
from piper_megatron.resources.layer_time import Machine, layer_time, together_s
from piper_megatron.resources.parameters import ParameterCount
from piper_megatron.resources.stage_layers import LayerKind, StageLayers, layer_kinds, mtp_kind
from piper_megatron.resources.state_costs import is_sharded
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

# what replicas exchange, as `step_communication` names it
_AMONG_REPLICAS = ("gradients", "expert_gradients", "parameters", "expert_parameters")


@dataclass(frozen=True)
class PieceTime:
    """Seconds of a micro-batch.

    Attributes:
        forward_s, backward_s: of the two passes.
        together_s: forward beside the backward pass of the same piece of another micro-batch.
    """

    forward_s: Number
    backward_s: Number
    together_s: Number


@dataclass(frozen=True)
class PieceTimes:
    """Times of everything that a stage may hold.

    Attributes:
        layers: of a decoder layer of each kind.
        spared: of a layer that full recomputation leaves out (`--recompute-method block`).
        first: of the embedding.
        mtp: of all layers of multi-token prediction, with their output layers and losses.
        last: of output layer and loss, and of `mtp`.
    """

    layers: dict[LayerKind, PieceTime]
    spared: dict[LayerKind, PieceTime]
    first: PieceTime
    mtp: PieceTime
    last: PieceTime


def piece_times(
    model: ModelSpec, training: TrainingSpec, sizes: Sizes, machine: Machine, imbalance: float
) -> PieceTimes:
    """Time of every piece.

    Args:
        model: what is trained.
        training: kernels, recomputation, overlap.
        sizes: of many layouts; pipeline sizes do not matter.
        machine: whose curves hold.
        imbalance: rows of the most loaded rank's experts over the mean.
    """

    def layer(kind: LayerKind, *, spared: bool = False) -> PieceTime:
        settings = varied(training, exact=False, spared=spared)
        time = layer_time(
            model,
            settings,
            sizes,
            machine,
            moe=kind.moe,
            windowed=kind.windowed,
            imbalance=imbalance,
        )
        together: Number = time.forward_s + time.backward_s
        if training.overlap_moe_expert_parallel_comm:
            together = together_s(time, time, training)
        return PieceTime(time.forward_s, time.backward_s, together)

    def end(name: str) -> PieceTime:
        time = end_time(name, model, training, sizes, machine)
        return PieceTime(time.forward_s, time.backward_s, time.forward_s + time.backward_s)

    kinds = set(layer_kinds(model))
    layers = {kind: layer(kind) for kind in kinds}
    block = training.recompute_granularity == "full" and training.recompute_method == "block"
    spared = {kind: layer(kind, spared=True) for kind in kinds} if block else layers
    embedding, head, mtp = end("embedding"), end("head"), sum_times()
    if model.mtp_layers:
        parts = (layers[mtp_kind(model)], embedding, end("prediction"), head)
        mtp = sum_times(*((part, model.mtp_layers) for part in parts))
    return PieceTimes(layers, spared, embedding, mtp, sum_times((head, 1), (mtp, 1)))


def sum_times(*counted: tuple[PieceTime, Number]) -> PieceTime:
    """Several pieces, each so many times."""
    return PieceTime(
        *(
            sum((getattr(time, name) * count for time, count in counted), start=0.0)
            for name in ("forward_s", "backward_s", "together_s")
        )
    )


@dataclass(frozen=True)
class Stage:
    """A stage of each layout.

    Attributes:
        rank: of the pipeline.
        time: of its chunks, for one micro-batch.
    """

    rank: Number
    time: PieceTime


def stage_time(held: StageLayers, pieces: PieceTimes, spared: Number) -> PieceTime:
    """Time of a stage's chunks for one micro-batch.

    Args:
        held: what the stage holds.
        pieces: times for these layouts.
        spared: share of its layers that full recomputation leaves out.
    """
    return sum_times(
        (pieces.first, held.embedding),
        (pieces.last, held.last),
        *((pieces.layers[kind], count * (1 - spared)) for kind, count in held.layers.items()),
        *((pieces.spared[kind], count * spared) for kind, count in held.layers.items()),
    )


def whole_time(model: ModelSpec, pieces: PieceTimes, spared: Number) -> PieceTime:
    """Time of all stages together for one micro-batch."""
    kinds = layer_kinds(model)
    counts: dict[LayerKind, Number] = {kind: kinds.count(kind) for kind in set(kinds)}
    return stage_time(StageLayers(counts, embedding=1, last=1), pieces, spared)


def pipeline_seconds(
    training: TrainingSpec,
    sizes: Sizes,
    stages: Sequence[Stage],
    whole: PieceTime,
    boundary_s: Number,
) -> Number:
    """Seconds of the pipeline's part of a step.

    Args:
        training: schedule and its overlap.
        sizes: of many layouts.
        stages: those that may be the slowest.
        whole: time of all stages together.
        boundary_s: of a tensor over a boundary.
    """
    micro_batches = sizes.micro_batches
    busiest: Number = 0.0
    slowest: Number = 0.0
    for stage in stages:
        alone = stage.time.forward_s + stage.time.backward_s
        working = micro_batches * alone
        if training.overlap_moe_expert_parallel_comm:
            passes = micro_batches * sizes.vpp
            warmup = np.minimum(_warmup(training, sizes, stage.rank), passes)
            working = (warmup * alone + (passes - warmup) * stage.time.together_s) / sizes.vpp
        sent = micro_batches * _held_sends(training, sizes, stage.rank)
        busiest = np.maximum(busiest, working + sent * boundary_s)
        slowest = np.maximum(slowest, alone)
    fill = (whole.forward_s + whole.backward_s - slowest) / sizes.vpp
    return busiest + np.maximum(fill, 0.0) + 2 * (sizes.pp - 1) * boundary_s


def _warmup(training: TrainingSpec, sizes: Sizes, stage: Number) -> Number:
    """As `schedule.Schedule.warmup`, of passes that run side by side."""
    group = training.microbatch_group_size_per_vp_stage or sizes.pp
    interleaved = 2 * (sizes.pp - stage - 1) + (sizes.vpp - 1) * group + 1
    return np.where(np.greater(sizes.pp, 1), interleaved, 1)


def _held_sends(training: TrainingSpec, sizes: Sizes, stage: Number) -> Number:
    """Tensors of a micro-batch that a stage waits for while they travel."""
    onward = np.where(np.less(stage, sizes.pp - 1), 1, 0)
    back = np.where(np.greater(stage, 0), 1, 0)
    plain = onward + back
    many = np.greater(sizes.vpp, 1)
    if not training.overlap_p2p_comm:
        return np.where(many, 2 * sizes.vpp, plain)
    held = 0 if training.overlap_moe_expert_parallel_comm else sizes.vpp
    return np.where(many, held, plain)


def replica_exchanges(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    machine: Machine,
    parameters: ParameterCount,
) -> dict[str, Exchange]:
    """What a stage with so many parameters exchanges once a step.

    Args:
        model: what is trained.
        training: optimizer, formats, overlap.
        sizes: of many layouts.
        machine: whose curves hold.
        parameters: of one rank of the stage.
    """
    return step_communication(
        model,
        training,
        sizes,
        machine.platform,
        dense_elements=parameters.dense,
        expert_elements=parameters.expert,
        order=machine.order,
    )


def replica_seconds(
    training: TrainingSpec, sizes: Sizes, exchanges: dict[str, Exchange], first: PieceTime
) -> Number:
    """Seconds that gradients and parameters add to a step, on the first stage, which ends last.

    Args:
        training: overlap of both.
        sizes: of many layouts.
        exchanges: of the first stage, by part.
        first: passes of the first stage.
    """
    rest = exchanges["replicated_gradients"].backward_s + exchanges["gradient_norm"].backward_s
    rest = rest + np.where(np.greater(sizes.pp, 1), exchanges["tied_embedding"].backward_s, 0.0)
    replicas = [exchanges[name] for name in _AMONG_REPLICAS if name in exchanges]
    forward_s, backward_s = first.forward_s, first.backward_s
    if training.fsdp:
        return (
            rest
            + _not_hidden([each.forward for each in replicas], sizes.micro_batches * forward_s)
            + _not_hidden([each.backward for each in replicas], sizes.micro_batches * backward_s)
        )

    reduced = sum((each.backward_s for each in replicas), start=0.0)
    gathered = sum((each.forward_s for each in replicas), start=0.0)
    if training.overlap_grad_reduce:
        bucket = sum((each.backward.exposed_s for each in replicas), start=0.0)
        plain = np.maximum(reduced - backward_s, bucket)
        # the last chunk's reduction follows its last pass; others run behind those of later chunks
        earlier = sizes.pp * backward_s * (sizes.vpp - 1) / sizes.vpp
        interleaved = np.maximum(reduced / sizes.vpp, reduced - earlier)
        reduced = np.where(np.greater(sizes.vpp, 1), interleaved, plain)
    if training.overlap_param_gather:
        gathered = np.maximum(gathered - forward_s, 0.0) / sizes.vpp
    return reduced + gathered + rest


def _not_hidden(passes: Sequence[Pass], computing_s: Number) -> Number:
    hideable = sum((each.hideable_s for each in passes), start=0.0)
    exposed = sum((each.exposed_s for each in passes), start=0.0)
    return exposed + np.maximum(hideable - computing_s, 0.0)


def update_seconds(
    training: TrainingSpec, sizes: Sizes, machine: Machine, parameters: ParameterCount
) -> Number:
    """Seconds of the optimizer step on a rank with so many parameters."""
    dense: Number = 1
    expert: Number = 1
    if is_sharded(training) or training.fsdp:
        instances = training.num_distributed_optimizer_instances
        dense = sizes.dp * sizes.cp // instances
        expert = np.maximum(sizes.edp // instances, 1)
    return optimizer_seconds(
        training,
        machine.accelerator,
        held=parameters.total,
        updated=parameters.dense / dense + parameters.expert / expert,
        tensors=parameters.tensors,
        host_factor=machine.stack.host,
    )
