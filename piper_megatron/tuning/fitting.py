"""What fits at all: on how many GPUs, and what would have to change where nothing does."""

from collections.abc import Iterator
from dataclasses import replace

from piper_megatron.resources.estimate import GIB
from piper_megatron.resources.parameters import total_parameters
from piper_megatron.tuning.finalist import WorkedOut, worked_out
from piper_megatron.tuning.score import Scores, fits
from piper_megatron.tuning.space import divisors, layouts, tunable_groups
from piper_megatron.tuning.task import Task
from piper_megatron.workload.flags import spelling_of
from piper_megatron.workload.spec import DTYPE_BYTES

# times the GPUs there are
MORE_GPUS = (2, 4, 8, 16, 32, 64)
_CLOSEST = 4


def can_fit(task: Task, limit: float) -> bool:
    """Whether any candidate needs no more than the limit, in closed form.

    Args:
        task: what is tuned.
        limit: GiB of the device.
    """
    space = layouts(task)
    return len(space) > 0 and fits(task, space, limit)


def gpu_counts(task: Task, limit: float) -> list[int]:
    """Numbers of GPUs that could be enough: divisors of a node, then whole nodes, then all.

    Weights and gradients are on some device each, however they are shared out.

    Args:
        task: what is tuned.
        limit: GiB of a device.
    """
    training, node = task.training(), task.platform.ranks_per_node
    eight = training.fp8_param_gather or training.fp4
    weight = 1 if eight else training.element_bytes
    held = total_parameters(task.model) * (weight + DTYPE_BYTES[training.main_grads_dtype])
    counts = sorted({*divisors(node), *range(node, task.gpus, node), task.gpus})
    return [count for count in counts if count <= task.gpus and count * limit * GIB >= held]


def near_miss(task: Task, scores: Scores, limit: float) -> tuple[WorkedOut | None, tuple[str, ...]]:
    """What comes closest where nothing fits, and what would change that.

    Args:
        task: what is tuned.
        scores: of its candidates.
        limit: GiB of the device.
    """
    nearest: WorkedOut | None = None
    for place in range(min(len(scores.leanest), _CLOSEST)):
        found = worked_out(task, scores.leanest[place], limit)
        if isinstance(found, WorkedOut) and (
            nearest is None or found.needed_gib < nearest.needed_gib
        ):
            nearest = found
    return nearest, tuple(_advice(task, nearest, limit))


def _advice(task: Task, nearest: WorkedOut | None, limit: float) -> Iterator[str]:
    capacity = task.platform.need_accelerator().memory.capacity_gib
    if nearest is not None and nearest.needed_gib <= capacity:
        margin = max(0.0, int(1000 * (1 - nearest.needed_gib / capacity)) / 1000)
        yield f"it would fit with --memory-margin {margin:g}"
    for group in tunable_groups():
        given = sorted(task.given & set(group))
        if given and can_fit(task.without(given), limit):
            yield f"it would fit without {' '.join(map(spelling_of, given))}"
    for times in MORE_GPUS:
        if can_fit(replace(task, gpus=task.gpus * times), limit):
            yield f"it would fit on {task.gpus * times:,} GPUs"
            return
    yield f"it would not fit on {task.gpus * MORE_GPUS[-1]:,} GPUs either"
