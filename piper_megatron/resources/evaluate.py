"""Memory and step time of thousands of layouts at once.

The layer formulas are those of a single estimate. What that follows through buffers and schedules
is in closed form here: see `closed_memory.py` and `closed_time.py`.
"""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.closed_memory import pieces, spared_share, stage_peak_bytes
from piper_megatron.resources.closed_time import (
    Stage,
    piece_times,
    pipeline_seconds,
    replica_seconds,
    stage_time,
    update_seconds,
    whole_time,
)
from piper_megatron.resources.communication import Order, boundary_seconds
from piper_megatron.resources.communicators import communicators_gib, needed_gib
from piper_megatron.resources.estimate import GIB
from piper_megatron.resources.layer_time import Machine
from piper_megatron.resources.parameters import count, stage_tensors
from piper_megatron.resources.stage_layers import leading_stages, stage_layers
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

# sizes on which a layer depends, and not only a pipeline or a step
_LAYER_SIZES = ("tp", "cp", "ep", "etp", "micro_batch")
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
    accelerator = platform.need_accelerator()
    machine = Machine(platform=platform, stack=accelerator.stack(stack), order=order)
    sizes = _arrays(sizes)
    few, which = _distinct(sizes, _LAYER_SIZES)
    activations = _each(pieces(model, training, few, imbalance), which)
    times = _each(piece_times(model, training, few, machine, imbalance), which)

    peak_bytes: Number = 0.0
    update_s: Number = 0.0
    stages = []
    for stage in leading_stages(model, sizes):
        held = stage_layers(model, sizes, stage)
        tensors = stage_tensors(
            model,
            training,
            sizes,
            dense_layers=held.with_experts(False),
            moe_layers=held.with_experts(True),
            embedding=held.embedding,
            mtp=held.last * (model.mtp_layers > 0),
            loss=held.last,
        )
        parameters = count(tensors, sizes)
        peak = stage_peak_bytes(
            model,
            training,
            sizes,
            stage,
            held,
            tensors,
            activations,
            transposed_weights=accelerator.transposes_8_bit,
        )
        peak_bytes = np.maximum(peak_bytes, peak)
        update_s = np.maximum(update_s, update_seconds(training, sizes, machine, parameters))
        spared = spared_share(training, sizes, held)
        stages.append(Stage(stage, stage_time(held, times, spared), parameters, spared))

    first = stages[0]
    step_s = (
        pipeline_seconds(
            training,
            sizes,
            stages,
            whole_time(model, times, first.spared),
            boundary_seconds(model, training, sizes, platform, order=order),
        )
        + replica_seconds(model, training, sizes, machine, first)
        + update_s
    )
    peak_gib = peak_bytes / GIB
    overheads = accelerator.overheads
    needed = needed_gib(peak_gib, communicators_gib(sizes, overheads))
    feasible = needed <= accelerator.memory.capacity_gib
    return Evaluation(*(np.asarray(each) for each in (step_s, peak_gib, needed, feasible)))


def _arrays(sizes: Sizes) -> Sizes:
    """The same with arrays of one length for what may vary."""
    names = [field.name for field in fields(sizes) if field.name not in _SHARED]
    arrays = np.broadcast_arrays(*(np.atleast_1d(getattr(sizes, name)) for name in names))
    varying: dict[str, Any] = dict(zip(names, arrays, strict=True))
    return replace(sizes, **varying)


def _distinct(sizes: Sizes, names: tuple[str, ...]) -> tuple[Sizes, np.ndarray]:
    """Layouts that differ in the named sizes, and for every layout the number of its like."""
    columns = [getattr(sizes, name) for name in names]
    keys = np.ravel_multi_index(columns, [int(column.max()) + 1 for column in columns])
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    varying: dict[str, Any] = {
        field.name: getattr(sizes, field.name)[first]
        for field in fields(sizes)
        if field.name not in _SHARED
    }
    return replace(sizes, **varying), which


def _each(value: Any, which: np.ndarray) -> Any:
    """A result for distinct layouts, for all that are like them."""
    if isinstance(value, dict):
        return {key: _each(part, which) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _each(getattr(value, field.name), which) for field in fields(value)}
        return replace(value, **parts)
    array = np.asarray(value)
    return array[which] if array.ndim else value
