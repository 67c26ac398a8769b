"""Peak memory of a stage in closed form, for many layouts at once.

What `memory.py` follows through schedule and buffers, here without padding, with the chunks of a
stage taken as equal, and with the micro-batches that are alive when the first backward pass begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.resources.activations.buffers import buffers
from piper_megatron.resources.activations.ends import (
    embedding_activations,
    head_activations,
    mtp_activations,
)
from piper_megatron.resources.activations.layer import Activations, layer_activations
from piper_megatron.resources.parameters import Tensor, count, router_bytes
from piper_megatron.resources.stage_layers import StageLayers
from piper_megatron.resources.state_costs import is_sharded
from piper_megatron.resources.states import state_bytes
from piper_megatron.workload.spec import ModelSpec, TrainingSpec


@dataclass(frozen=True)
class PieceBytes:
    """Bytes that a micro-batch needs on one rank.

    Attributes:
        kept: from forward to backward.
        working: beyond `kept`, at the highest point of its backward pass.
        working_forward: the same of its forward pass.
    """

    kept: Number
    working: Number
    working_forward: Number


@dataclass(frozen=True)
class Pieces:
    """Activations of everything that a stage may hold.

    Attributes:
        layers: of a decoder layer, with and without experts; a kind that the model lacks is absent.
        spared: of a layer that full recomputation leaves out (`--recompute-method block`).
        mtp: of one layer of multi-token prediction.
        embedding: of the input embedding.
        head: of output layer and loss.
        buffers: bytes allocated once, on stages with the output layer and on others.
    """

    layers: dict[bool, PieceBytes]
    spared: dict[bool, PieceBytes]
    mtp: PieceBytes
    embedding: PieceBytes
    head: PieceBytes
    buffers: dict[bool, Number]


def pieces(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    imbalance: float,
    workspace_bytes: float,
) -> Pieces:
    """Activations of every piece.

    Args:
        model: what is trained.
        training: what is kept, recomputed and offloaded.
        sizes: of many layouts; pipeline sizes do not matter.
        imbalance: rows of the most loaded rank's experts over the mean.
        workspace_bytes: see `buffers`.
    """
    given = model, training, sizes
    kinds = sorted(set(model.moe_layers))
    layers, spared = (
        {
            moe: _bytes(
                layer_activations(*given, moe=moe, imbalance=imbalance, checkpointed=checkpointed)
            )
            for moe in kinds
        }
        for checkpointed in (None, False)
    )
    nothing = PieceBytes(0, 0, 0)
    return Pieces(
        layers,
        spared,
        _bytes(mtp_activations(*given, imbalance=imbalance)) if model.mtp_layers else nothing,
        _bytes(embedding_activations(*given)),
        _bytes(head_activations(*given)),
        {
            head: sum(
                buffers(
                    *given, workspace_bytes, moe=kinds, head=head, mtp=head and model.mtp_layers > 0
                ).values()
            )
            for head in (False, True)
        },
    )


def _bytes(activations: Activations) -> PieceBytes:
    return PieceBytes(activations.total, activations.working, activations.working_forward)


@dataclass(frozen=True)
class Settled:
    """Bytes of a stage that training settings of the optimizer decide.

    Attributes:
        resident: between steps.
        floor: beyond `resident`, at the highest point outside of the passes.
    """

    resident: Number
    floor: Number


def settled_bytes(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    held: StageLayers,
    tensors: Sequence[Tensor],
    *,
    transposed_weights: bool,
) -> Settled:
    """What a rank of a stage holds whether or not it computes.

    Args:
        model: what is trained.
        training: precision and optimizer.
        sizes: of many layouts.
        held: what the stage holds.
        tensors: its parameters.
        transposed_weights: as for `state_bytes`.
    """
    states = state_bytes(model, training, sizes, tensors, transposed_weights=transposed_weights)
    resident = states.resident_bytes
    if model.experts is not None:
        resident = resident + held.with_experts(True) * router_bytes(model, training)
    load = _load_bytes(training, sizes, tensors) - states.optimizer_bytes
    return Settled(resident, np.maximum(states.step_peak_bytes, load))


def passing_bytes(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    stage: Number,
    held: StageLayers,
    pieces: Pieces,
) -> tuple[Number, Number]:
    """Bytes of a stage that its passes need: buffers that stay, and the highest point above them.

    Args:
        model: what is trained.
        training: what is kept and recomputed, schedule.
        sizes: of many layouts.
        stage: pipeline rank, one for each layout.
        held: what the stage holds.
        pieces: activations for these layouts.
    """
    stays = np.where(held.last == 1, pieces.buffers[True], pieces.buffers[False])
    return stays, _passes_bytes(model, training, sizes, stage, held, pieces)


def _load_bytes(training: TrainingSpec, sizes: Sizes, tensors: Sequence[Tensor]) -> Number:
    """Parameters that exist twice when the last chunk's last buffer takes them over."""
    if training.fsdp or not is_sharded(training):
        return 0.0
    parameters = count(tensors, sizes)
    experts_last = np.where(parameters.expert > 0, parameters.expert, parameters.dense)
    return training.element_bytes * experts_last / sizes.vpp


def live_micro_batches(training: TrainingSpec, sizes: Sizes, stage: Number) -> Number:
    """Chunks' micro-batches whose activations are alive when a stage's first backward pass begins.

    Passes side by side need as many: the one that goes forward is alive before the slot
    (`schedule.Schedule.live`).
    """
    behind = sizes.pp - 1 - stage
    group = training.microbatch_group_size_per_vp_stage or sizes.pp
    plain = behind + 1
    interleaved = 2 * behind + (sizes.vpp - 1) * group + 1
    passes = sizes.micro_batches * sizes.vpp
    return np.minimum(np.where(np.greater(sizes.vpp, 1), interleaved, plain), passes)


def _passes_bytes(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    stage: Number,
    held: StageLayers,
    pieces: Pieces,
) -> Number:
    """Highest point of forward and backward passes above what is resident.

    When the last stage's first backward pass begins, its head is alive once.
    """
    spared = spared_share(training, sizes, held)
    kept: Number = 0
    working: Number = 0
    forward: Number = 0
    one_layer: Number = 0
    for moe, layer in pieces.layers.items():
        count, without = held.with_experts(moe), pieces.spared[moe]
        present = np.greater(count, 0)
        kept = kept + count * ((1 - spared) * layer.kept + spared * without.kept)
        working = np.maximum(working, np.where(present, layer.working, 0))
        forward = np.maximum(forward, np.where(present, layer.working_forward, 0))
        one_layer = np.maximum(one_layer, np.where(present, layer.kept, 0))
    live = live_micro_batches(training, sizes, stage)
    first = np.minimum(live, np.where(np.greater(sizes.vpp, 1), 2 * sizes.pp, live))
    at_ends = held.embedding * first * pieces.embedding.kept
    last = held.last * (pieces.head.kept + model.mtp_layers * pieces.mtp.kept)
    behind = last
    layers = kept * live / sizes.vpp + at_ends
    head = layers + last + held.last * np.maximum(pieces.head.working, pieces.head.working_forward)
    mtp = layers + last + held.last * (pieces.mtp.working - pieces.head.kept)
    working = layers + last - behind + np.maximum(working, forward)
    if training.overlap_moe_expert_parallel_comm:
        working = working + one_layer + forward
    peak = np.maximum(head, working)
    return np.maximum(peak, mtp) if model.mtp_layers else peak


def spared_share(training: TrainingSpec, sizes: Sizes, held: StageLayers) -> Number:
    """Share of a stage's layers that full recomputation leaves out."""
    if training.recompute_granularity != "full" or training.recompute_method != "block":
        return 0.0
    in_chunk = np.maximum(held.count / sizes.vpp, 1)
    return np.clip(1 - (training.recompute_num_layers or 0) / in_chunk, 0.0, 1.0)
