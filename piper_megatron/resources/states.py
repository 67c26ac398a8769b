"""Weights, gradients and optimizer states: what a rank holds whether or not it computes.

`stage_states` is exact: it adds the padding of Megatron's buffers and takes the rank that owns
most. `state_bytes` leaves padding out and takes many layouts at once.
"""

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields

import numpy as np

from piper_megatron.layout.job import Job
from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.resources.buffers import Buffer, stage_buffers
from piper_megatron.resources.parameters import (
    Tensor,
    chunk_tensors,
    count,
    layer_tensors,
    router_bytes,
)
from piper_megatron.resources.state_costs import (
    gradient_bytes,
    has_quantized_weights,
    in_low_precision,
    is_emerging,
    is_sharded,
    optimizer_cost,
    weight_cost,
)
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

_GATHERED_LAYERS = 2  # FSDP: the one that runs and the one that is fetched


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of one rank, or arrays with a value for each of many layouts.

    Attributes:
        weights_bytes: parameters as the model holds them, in buffers where there are some.
        low_precision_bytes: copies of weights in 8 or 4 bits beyond those.
        gradients_bytes: gradient buffers.
        optimizer_bytes: main parameters and moments on the device, after the first step.
        gathered_bytes: layers that FSDP has put together at a time.
        host_bytes: what the optimizer keeps in the host's memory.
        step_peak_bytes: needed beyond all these while the optimizer steps.
    """

    weights_bytes: Number
    low_precision_bytes: Number
    gradients_bytes: Number
    optimizer_bytes: Number
    gathered_bytes: Number = 0
    host_bytes: Number = 0
    step_peak_bytes: Number = 0

    @property
    def resident_bytes(self) -> Number:
        """Bytes on the device between steps."""
        return (
            self.weights_bytes
            + self.low_precision_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.gathered_bytes
        )


@dataclass(frozen=True, kw_only=True)
class StageStates(StateBytes):
    """Bytes of the rank of a stage that owns most of the optimizer.

    Attributes:
        router_bytes: counters and biases of routers, which are no parameters.
        load_peak_bytes: needed beyond the resident bytes while the model and its buffers are built.
    """

    router_bytes: int
    load_peak_bytes: int

    @property
    def resident_bytes(self) -> Number:
        """Bytes on the device between steps."""
        return super().resident_bytes + self.router_bytes


def stage_states(job: Job, *, transposed_weights: bool = True) -> list[StageStates]:
    """States of every pipeline stage.

    Args:
        job: what is trained and how.
        transposed_weights: as for `weight_cost`: the device needs 8-bit weights of the per-tensor
            recipes in two orientations.
    """
    known: dict[Hashable, StageStates] = {}
    found = []
    for stage in range(job.layout.pp):
        kind = _kind_of_stage(job, stage)
        if kind not in known:
            known[kind] = _states(job, stage, transposed_weights)
        found.append(known[kind])
    return found


def _kind_of_stage(job: Job, stage: int) -> Hashable:
    """By what the states of stages differ."""
    model = job.model
    chunks = (
        (
            tuple((model.moe_layers[n], n in (0, model.layers - 1)) for n in chunk.layers),
            (chunk.embedding, chunk.mtp_layers, chunk.loss),
        )
        for chunk in job.pipeline.stages[stage]
    )
    return stage == 0, tuple(chunks)


def state_bytes(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    tensors: Iterable[Tensor],
    *,
    transposed_weights: bool = True,
) -> StateBytes:
    """States without padding, every rank owning an equal share.

    FSDP is counted to first order: what its strategy shards is divided, and two layers are whole at
    a time. Its gradients have the type of the weights unless `--megatron-fsdp-main-grads-dtype`
    says otherwise (megatron_fsdp/param_and_grad_buffer.py:2323 of 0.19.2).

    Args:
        model: what is trained.
        training: precision and optimizer.
        sizes: of one layout or of many.
        tensors: parameters of a rank, as `stage_tensors` or `chunk_tensors` give them.
        transposed_weights: as for `stage_states`.
    """
    tensors = list(tensors)
    held = gradients = optimizer = host = low_precision = copies = 0 * sizes.world
    # the optimizers of dense and of expert parameters step one after the other
    upcast: dict[bool, Number] = {False: 0 * sizes.world, True: 0 * sizes.world}
    for tensor in (*tensors, *_room_for_whole_matrices(training, sizes, tensors)):
        elements = tensor.elements * tensor.copies
        low = in_low_precision(tensor, training, model.layers)
        weight = weight_cost(training, low_precision=low, transposed=transposed_weights)
        cost = optimizer_cost(
            training,
            matrix=is_emerging(training) and tensor.kind in ("linear", "matrix"),
            quantized=low and has_quantized_weights(training),
        )
        shares = _Shares(training, sizes, tensor.expert)
        held = held + elements / shares.weight * weight.weight
        low_precision = low_precision + elements * weight.low_precision
        gradients = gradients + elements / shares.gradient * shares.gradient_bytes
        optimizer = optimizer + elements / shares.optimizer * cost.resident
        host = host + elements / shares.optimizer * cost.host
        owned = elements / shares.optimizer
        copies = copies + owned * cost.gradient_copy
        upcast[tensor.expert] = upcast[tensor.expert] + owned * cost.upcast
    return StateBytes(
        weights_bytes=held,
        low_precision_bytes=low_precision,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        gathered_bytes=_gathered_bytes(model, training, sizes),
        host_bytes=host,
        step_peak_bytes=copies + np.maximum(upcast[False], upcast[True]),
    )


def _room_for_whole_matrices(
    training: TrainingSpec, sizes: Sizes, tensors: list[Tensor]
) -> list[Tensor]:
    """What Muon's layout leaves empty: every share has room for the largest matrix of a chunk."""
    room = []
    for expert in (False, True):
        shares = _Shares(training, sizes, expert).optimizer
        matrices = [
            tensor
            for tensor in tensors
            if is_emerging(training)
            and tensor.kind in ("linear", "matrix")
            and tensor.expert == expert
        ]
        if not matrices or (isinstance(shares, int) and shares == 1):
            continue
        present = [np.where(t.copies > 0, t.elements, 0) for t in matrices]
        total = sum(t.elements * t.copies for t in matrices)
        empty = np.maximum(0, sizes.vpp * shares * np.max(present, axis=0) - total)
        room.append(Tensor(name="room", elements=empty, kind="matrix", expert=expert))
    return room


class _Shares:
    """Ranks among which the parts of one parameter are divided."""

    def __init__(self, training: TrainingSpec, sizes: Sizes, expert: bool) -> None:
        group = sizes.edp if expert else sizes.dp * sizes.cp
        strategy = _fsdp_strategy(training)
        split_optimizer = strategy != "no_shard" if training.fsdp else is_sharded(training)
        instances = training.num_distributed_optimizer_instances
        self.optimizer: Number = group // instances if split_optimizer else 1
        self.gradient: Number = group if strategy in ("optim_grads", "optim_grads_params") else 1
        self.weight: Number = group if strategy == "optim_grads_params" else 1
        self.gradient_bytes = training.element_bytes if training.fsdp else gradient_bytes(training)


def _fsdp_strategy(training: TrainingSpec) -> str | None:
    if training.fsdp == "torch":
        return "optim_grads_params"
    return training.data_parallel_sharding_strategy if training.fsdp else None


def _gathered_bytes(model: ModelSpec, training: TrainingSpec, sizes: Sizes) -> Number:
    strategy = _fsdp_strategy(training)
    parts = (strategy == "optim_grads_params") + (strategy in ("optim_grads", "optim_grads_params"))
    if not parts:
        return 0
    layer = layer_tensors(model, training, sizes, moe=any(model.moe_layers))
    whole = count(layer, sizes).total
    return _GATHERED_LAYERS * parts * training.element_bytes * whole


def _states(job: Job, stage: int, transposed: bool) -> StageStates:
    chunks = [
        chunk_tensors(job.model, job.training, job.sizes, chunk)
        for chunk in job.pipeline.stages[stage]
    ]
    tensors = list(itertools.chain.from_iterable(chunks))
    without_padding = state_bytes(
        job.model, job.training, job.sizes, tensors, transposed_weights=transposed
    )
    padded: dict[str, Number] = {}
    load = 0
    if not job.training.fsdp:
        buffers = stage_buffers(job, stage, chunks)
        padded = _padded_bytes(job, buffers)
        load = _load_bytes(job, buffers, padded["optimizer_bytes"])
    parts = {
        field.name: int(np.ceil(padded.get(field.name, getattr(without_padding, field.name))))
        for field in fields(StateBytes)
    }
    return StageStates(
        **parts,
        router_bytes=_router_bytes(job, stage),
        load_peak_bytes=load,
    )


def _padded_bytes(job: Job, buffers: list[Buffer]) -> dict[str, Number]:
    """The parts that padding changes, on the rank that owns most."""
    ranks = np.arange(job.layout.world // job.layout.pp)
    owned_bytes = np.zeros((3, len(ranks)))
    upcast_bytes = np.zeros((2, len(ranks)))
    for buffer in buffers:
        kind = buffer.kind
        cost = optimizer_cost(job.training, matrix=kind.matrices, quantized=kind.quantized)
        inner = job.layout.ep * job.layout.etp if kind.expert else job.layout.tp
        owned = buffer.owned[ranks // inner % len(buffer.owned)]
        owned_bytes += np.outer((cost.resident, cost.host, cost.gradient_copy), owned)
        upcast_bytes[int(kind.expert)] += cost.upcast * owned
    # the optimizers of dense and of expert parameters step one after the other
    step_peak_bytes = owned_bytes[2] + upcast_bytes.max(axis=0)
    rank = (owned_bytes[0] + step_peak_bytes).argmax()
    optimizer, host, _ = owned_bytes[:, rank]
    return {
        "weights_bytes": sum(_weight_bytes(job.training, buffer) for buffer in buffers),
        "gradients_bytes": sum(buffer.elements for buffer in buffers)
        * gradient_bytes(job.training),
        "optimizer_bytes": optimizer,
        "host_bytes": host,
        "step_peak_bytes": step_peak_bytes[rank],
    }


def _weight_bytes(training: TrainingSpec, buffer: Buffer) -> float:
    low = buffer.kind.quantized
    return buffer.elements * weight_cost(training, low_precision=low, transposed=False).weight


def _load_bytes(job: Job, buffers: list[Buffer], optimizer: Number) -> int:
    """Parameters exist twice while the buffers take them over, one buffer after the other."""
    if not is_sharded(job.training):
        return 0
    made = [buffer.parameters * job.training.element_bytes for buffer in buffers]
    filled = [
        _weight_bytes(job.training, buffer) + buffer.elements * gradient_bytes(job.training)
        for buffer in buffers
    ]
    peak = max((sum(filled[: n + 1]) + sum(made[n:]) for n in range(len(buffers))), default=0)
    return max(0, int(peak - sum(filled) - optimizer))


def _router_bytes(job: Job, stage: int) -> int:
    model, routers = job.model, 0
    for chunk in job.pipeline.stages[stage]:
        routers += sum(model.moe_layers[layer] for layer in chunk.layers)
        if chunk.mtp_layers and model.mtp_moe:
            routers += 1 if model.mtp_repeated else chunk.mtp_layers
    return routers * router_bytes(model, job.training) if routers else 0
