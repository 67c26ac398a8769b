"""Memory and step time of thousands of layouts at once.

The layer formulas are those of a single estimate. What that follows through buffers and schedules
is in closed form here: see `closed_memory.py` and `closed_time.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.closed_memory import (
    Settled,
    passing_bytes,
    pieces,
    settled_bytes,
    spared_share,
)
from piper_megatron.resources.closed_time import (
    PieceTime,
    Stage,
    piece_times,
    pipeline_seconds,
    replica_exchanges,
    replica_seconds,
    stage_time,
    update_seconds,
    whole_time,
)
from piper_megatron.resources.communication import Exchange, Order, boundary_seconds
from piper_megatron.resources.communicators import communicators_gib, needed_gib
from piper_megatron.resources.estimate import GIB
from piper_megatron.resources.layer_time import Machine
from piper_megatron.resources.parameters import count, stage_tensors
from piper_megatron.resources.stage_layers import (
    beside_by_time,
    layer_kinds,
    leading_stages,
    stage_layers,
)
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

# sizes on which a layer depends, and not only a pipeline or a step
_LAYER_SIZES = ("tp", "cp", "ep", "etp", "micro_batch")
# sizes on which weights and optimizer states depend, and what stages hold
_STATE_SIZES = ("tp", "cp", "pp", "ep", "etp", "vpp")
_PIPELINE_SIZES = ("pp", "vpp")
# sizes that all layouts of a call share
_SHARED = ("global_batch", "seq")


@dataclass(frozen=True)
class Evaluation:
    """Arrays with one value for each layout.

    Attributes:
        step_s: time of a step.
        peak_gib: what torch would allocate on the fullest stage.
        needed_gib: what that stage needs of the device, see `StageMemory`.
        feasible: whether the device has as much.
    """

    step_s: np.ndarray
    peak_gib: np.ndarray
    needed_gib: np.ndarray
    feasible: np.ndarray


@dataclass(frozen=True)
class Passes:
    """What the passes of many layouts take, under one way to compute, recompute and exchange.

    Attributes:
        pipeline_s: of all passes of a step, in each order of the ranks.
        first: passes of the first stage.
        stays, peaks: bytes of each of the leading stages, as `passing_bytes` returns them.
    """

    pipeline_s: tuple[Number, ...]
    first: PieceTime
    stays: tuple[Number, ...]
    peaks: tuple[Number, ...]


@dataclass(frozen=True)
class States:
    """What weights, gradients and optimizer of many layouts take, under one kind of optimizer.

    Attributes:
        training: settings of the optimizer and its overlap.
        settled: bytes of each of the leading stages.
        exchanges: among replicas of the first stage, in each order of the ranks.
        update_s: of the optimizer step.
    """

    training: TrainingSpec
    settled: tuple[Settled, ...]
    exchanges: tuple[dict[str, Exchange], ...]
    update_s: Number


class Evaluator:
    """Evaluates many layouts of one model under several settings.

    A step's passes and a step's states depend on different settings, so that each is computed once
    for every one of its own settings and then put together in any combination.
    """

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        sizes: Sizes,
        platform: Platform,
        *,
        stack: str | None = None,
        imbalance: float = 1.0,
        orders: Sequence[Order] = ("megatron",),
        by_time: bool = False,
    ) -> None:
        """Counts the parameters of the stages.

        Args:
            model: what is trained.
            training: settings that all have in common.
            sizes: as for `evaluate`.
            platform: as for `evaluate`.
            stack: as for `evaluate`.
            imbalance: as for `evaluate`.
            orders: of the ranks on the devices; each layout has the one in which it is quickest.
            by_time: layers are shared out by the time that loss and prediction take under
                `training`; otherwise as `stage_layers` says.
        """
        self.model, self.imbalance = model, imbalance
        self.accelerator = platform.need_accelerator()
        software = self.accelerator.stack(stack)
        self.machines = [
            Machine(platform=platform, stack=software, order=order) for order in orders
        ]
        # the order moves pipelines and replicas alone
        self.machine = self.machines[0]
        self.sizes = _arrays(sizes)
        self._few, _, self._which = _distinct(self.sizes, _LAYER_SIZES)
        beside = self._beside(training) if by_time else None
        extra = () if beside is None else (beside,)
        pipelines, some, which = _distinct(self.sizes, _PIPELINE_SIZES, *extra)
        worth = None if beside is None else beside[some]
        stages = leading_stages(model, pipelines, worth)
        held = [stage_layers(model, pipelines, stage, worth) for stage in stages]
        self._stages, self._held = _each(stages, which), _each(held, which)
        # sharded gradients travel for every micro-batch
        names = (*_STATE_SIZES, "micro_batch") if training.fsdp else _STATE_SIZES
        self._holders, first, self._holder = _distinct(self.sizes, names, *extra)
        self._holders_held = _each(held, which[first])
        self._tensors = [
            stage_tensors(
                model,
                training,
                self._holders,
                dense_layers=each.with_experts(False),
                moe_layers=each.with_experts(True),
                embedding=each.embedding,
                mtp=each.last * (model.mtp_layers > 0),
                loss=each.last,
            )
            for each in self._holders_held
        ]
        self._parameters = [count(tensors, self._holders) for tensors in self._tensors]

    def _beside(self, training: TrainingSpec) -> np.ndarray:
        """Layers that loss and prediction are worth, for every layout."""
        times = piece_times(self.model, training, self._few, self.machine, self.imbalance)
        layer = times.layers[layer_kinds(self.model)[-1]]
        worth = (times.last.forward_s + times.last.backward_s) / (
            layer.forward_s + layer.backward_s
        )
        return beside_by_time(self.model, self.sizes, np.asarray(worth)[self._which])

    def passes(self, training: TrainingSpec) -> Passes:
        """Times and activations under these settings of layers and schedule."""
        given = self.model, training, self._few
        workspace_bytes = self.machine.accelerator.overheads.workspace_gib * GIB
        activations = _each(pieces(*given, self.imbalance, workspace_bytes), self._which)
        times = _each(piece_times(*given, self.machine, self.imbalance), self._which)
        stages, bytes_ = [], []
        for stage, held in zip(self._stages, self._held, strict=True):
            spared = spared_share(training, self.sizes, held)
            stages.append(Stage(stage, stage_time(held, times, spared)))
            bytes_.append(passing_bytes(self.model, training, self.sizes, stage, held, activations))
        first_spared = spared_share(training, self.sizes, self._held[0])
        whole = whole_time(self.model, times, first_spared)
        pipeline_s = tuple(
            pipeline_seconds(
                training,
                self.sizes,
                stages,
                whole,
                boundary_seconds(
                    self.model, training, self.sizes, machine.platform, order=machine.order
                ),
            )
            for machine in self.machines
        )
        stays, peaks = zip(*bytes_, strict=True)
        return Passes(pipeline_s, stages[0].time, stays, peaks)

    def states(self, training: TrainingSpec) -> States:
        """Bytes, exchanges and update under these settings of the optimizer."""
        transposed = self.accelerator.transposes_8_bit
        sizes = self._holders
        settled = tuple(
            settled_bytes(self.model, training, sizes, held, tensors, transposed_weights=transposed)
            for held, tensors in zip(self._holders_held, self._tensors, strict=True)
        )
        update_s: Number = 0.0
        for parameters in self._parameters:
            update_s = np.maximum(
                update_s, update_seconds(training, sizes, self.machine, parameters)
            )
        exchanges = tuple(
            replica_exchanges(self.model, training, sizes, machine, self._parameters[0])
            for machine in self.machines
        )
        found = States(training, settled, exchanges, update_s)
        return _each(found, self._holder)

    def together(self, passes: Passes, states: States) -> Evaluation:
        """A step with these passes and these states."""
        peak_bytes: Number = 0.0
        for settled, stays, peak in zip(states.settled, passes.stays, passes.peaks, strict=True):
            needed = settled.resident + stays + np.maximum(peak, settled.floor)
            peak_bytes = np.maximum(peak_bytes, needed)
        step_s: Number = np.inf
        for pipeline_s, exchanges in zip(passes.pipeline_s, states.exchanges, strict=True):
            among = replica_seconds(states.training, self.sizes, exchanges, passes.first)
            step_s = np.minimum(step_s, pipeline_s + among + states.update_s)
        peak_gib = peak_bytes / GIB
        overheads = self.accelerator.overheads
        needed = needed_gib(peak_gib, communicators_gib(self.sizes, overheads))
        feasible = needed <= self.accelerator.memory.capacity_gib
        return Evaluation(*(np.asarray(each) for each in (step_s, peak_gib, needed, feasible)))


def evaluate(
    model: ModelSpec,
    training: TrainingSpec,
    sizes: Sizes,
    platform: Platform,
    *,
    stack: str | None = None,
    imbalance: float = 1.0,
    order: Order = "megatron",
) -> Evaluation:
    """Evaluates many layouts of one model and one set of settings.

    Layouts must be legal. Stages hold what `stage_layers` says.

    Args:
        model: what is trained.
        training: settings that all layouts share; `microbatch_group_size_per_vp_stage` None stands
            for each layout's PP, and what only matters beyond a size of 1 (sequence parallelism,
            overlapped p2p) does nothing at 1.
        sizes: arrays [layouts]; what all share may be a number.
        platform: whose curves hold; it must have an accelerator.
        stack: name or description of the software, see `Accelerator.stack`.
        imbalance: rows of the most loaded rank's experts over the mean.
        order: of the ranks on the devices.

    Raises:
        PlatformError: the platform has no accelerator, or that lacks the precision.
    """
    evaluator = Evaluator(
        model, training, sizes, platform, stack=stack, imbalance=imbalance, orders=(order,)
    )
    return evaluator.together(evaluator.passes(training), evaluator.states(training))


def _arrays(sizes: Sizes) -> Sizes:
    """The same with arrays of one length for what may vary."""
    names = [field.name for field in fields(sizes) if field.name not in _SHARED]
    arrays = np.broadcast_arrays(*(np.atleast_1d(getattr(sizes, name)) for name in names))
    varying: dict[str, Any] = dict(zip(names, arrays, strict=True))
    return replace(sizes, **varying)


def _distinct(
    sizes: Sizes, names: tuple[str, ...], *more: np.ndarray
) -> tuple[Sizes, np.ndarray, np.ndarray]:
    """Layouts that differ in the named sizes, or in more columns of theirs.

    Returns:
        These, their places among all, and for every layout the number of its like.
    """
    columns = [*(getattr(sizes, name) for name in names), *more]
    keys = np.ravel_multi_index(columns, [int(column.max()) + 1 for column in columns])
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    varying: dict[str, Any] = {
        field.name: getattr(sizes, field.name)[first]
        for field in fields(sizes)
        if field.name not in _SHARED
    }
    return replace(sizes, **varying), first, which


def _each(value: Any, which: np.ndarray) -> Any:
    """A result for distinct layouts, for all that are like them."""
    if isinstance(value, list | tuple):
        return type(value)(_each(part, which) for part in value)
    if isinstance(value, dict):
        return {key: _each(part, which) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _each(getattr(value, field.name), which) for field in fields(value)}
        return replace(value, **parts)
    array = np.asarray(value)
    return array[which] if array.ndim else value
