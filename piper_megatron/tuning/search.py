"""The search: all candidates in closed form, the best of them event by event."""

import time
from dataclasses import replace
from typing import Literal

import numpy as np

from piper_megatron.errors import WorkloadError
from piper_megatron.strict import StrictModel
from piper_megatron.tuning.finalist import WorkedOut, plan
from piper_megatron.tuning.fitting import can_fit, gpu_counts, near_miss
from piper_megatron.tuning.limit import limit_gib
from piper_megatron.tuning.parts import Progress, Run, workers
from piper_megatron.tuning.plan import Plan
from piper_megatron.tuning.score import Candidate, Scores, score
from piper_megatron.tuning.shortlist import shortlist
from piper_megatron.tuning.space import culprits, layouts
from piper_megatron.tuning.task import Task
from piper_megatron.workload.flags import spelling_of

Objective = Literal["time", "memory", "gpus"]
# candidates of the front may be so many times slower than the best
SLACK = 1.25


class Point(StrictModel):
    """A candidate of the front, in closed form."""

    step_s: float
    needed_gib: float
    layout: str


class Outcome(StrictModel):
    """What a search found.

    Attributes:
        plans: the best first.
        nearest: where nothing fits, what comes closest.
        advice: where nothing fits, what would change it.
        front: fitting candidates of which none is quicker and smaller than another, in closed form.
        rejected: reason -> number of candidates.
        searched: candidates looked at, legal and illegal.
        legal: those that Megatron would take.
        limit_gib: of the device, that a plan may need.
        seconds: that the search took.
        notes: what was assumed of the task.
    """

    plans: tuple[Plan, ...]
    nearest: Plan | None = None
    advice: str = ""
    front: tuple[Point, ...] = ()
    rejected: dict[str, int]
    searched: int
    legal: int
    limit_gib: float
    seconds: float
    notes: tuple[str, ...] = ()


def search(
    task: Task,
    *,
    objective: Objective = "time",
    margin: float,
    top: int = 5,
    processes: int = 1,
    name: str = "this command's model",
    progress: Progress | None = None,
) -> Outcome:
    """Searches the space of a task.

    Args:
        task: what is tuned.
        objective: the quickest plan that fits, the smallest one, or the fewest GPUs with one.
        margin: share of the device that stays free.
        top: plans to return.
        processes: that work at the same time.
        name: of the model.
        progress: told the name of a stage of the search and the share of it that is done.

    Raises:
        WorkloadError: the user's arguments leave no legal layout; names the one to blame.
    """
    began = time.perf_counter()
    limit = limit_gib(task.platform, margin)
    with workers(processes, progress) as run:
        if objective == "gpus":
            task, scores, chosen = _fewest(task, limit, run, top, progress)
        else:
            scores, chosen = _searched(task, limit, run, smallest=objective == "memory", top=top)
        nearest, advice = (None, ()) if chosen else near_miss(task, scores, limit)
    return Outcome(
        plans=tuple(plan(task, each, rank, name) for rank, each in enumerate(chosen, start=1)),
        nearest=None if nearest is None else plan(task, nearest, 1, name),
        advice="; ".join(advice),
        front=tuple(map(_point, scores.front)),
        rejected=dict((+scores.rejected).most_common()),
        searched=scores.searched,
        legal=scores.legal,
        limit_gib=limit,
        seconds=time.perf_counter() - began,
        notes=tuple(_notes(task, objective)),
    )


def _searched(
    task: Task, limit: float, run: Run, *, smallest: bool, top: int
) -> tuple[Scores, list[WorkedOut]]:
    space = layouts(task)
    if not len(space):
        raise _no_layout(task, space.refusal)
    scores = score(task, space, limit, np.inf if smallest else SLACK, run)
    return scores, shortlist(task, scores, limit, run, smallest=smallest, top=top)


def _fewest(
    task: Task, limit: float, run: Run, top: int, progress: Progress | None
) -> tuple[Task, Scores, list[WorkedOut]]:
    """The search on the fewest of the task's GPUs with which it fits, or on all of them."""
    counts = [count for count in gpu_counts(task, limit) if count < task.gpus]
    for place, count in enumerate(counts):
        if progress is not None:
            progress("numbers of GPUs", place / len(counts))
        smaller = replace(task, gpus=count)
        if can_fit(smaller, limit):
            scores, chosen = _searched(smaller, limit, run, smallest=False, top=top)
            if chosen:
                return smaller, scores, chosen
    return task, *_searched(task, limit, run, smallest=False, top=top)


def _no_layout(task: Task, refusal: str) -> WorkloadError:
    blamed = culprits(task)
    if not blamed:
        return WorkloadError(
            f"no layout on {task.gpus:,} GPUs is legal for this model, its batch and its fixed "
            f"arguments: {refusal}"
        )
    flags = " or ".join(
        f"{spelling_of(dest)} {getattr(task.arguments.values, dest)}" for dest in blamed
    )
    return WorkloadError(
        f"no layout on {task.gpus:,} GPUs is legal with {flags}, which can be left to the search: "
        f"{refusal}"
    )


def _notes(task: Task, objective: Objective) -> list[str]:
    notes, values = [], task.base
    node, gpus = task.platform.ranks_per_node, task.gpus
    if not (values.bf16 or values.fp16):
        notes.append("neither --bf16 nor --fp16 is given: the plans are for training in fp32")
    if objective == "gpus":
        notes.append(f"{gpus:,} GPUs are the fewest on which it fits")
    if gpus < node:
        notes.append(f"{gpus} of a node's {node} GPUs are used")
    elif gpus % node:
        notes.append(
            f"{gpus:,} GPUs are used: {gpus // node:,} whole nodes of {node}, and {gpus % node} of "
            "another"
        )
    if task.model.experts:
        even, uneven = (
            "experts are taken as evenly loaded; --imbalance says otherwise",
            f"the most loaded expert rank is taken to receive {task.imbalance:g} times the mean",
        )
        notes.append(even if task.imbalance == 1 else uneven)
    if task.arguments.unknown:
        notes.append(f"not read: {' '.join(task.arguments.unknown)}, no option of Megatron's")
    return notes


def _point(candidate: Candidate) -> Point:
    sizes = " ".join(
        f"{axis.upper()} {candidate.sizes[axis]}"
        for axis in ("tp", "cp", "pp", "vpp", "ep", "etp")
        if candidate.sizes[axis] > 1
    )
    settings = ", ".join(choice.name for choice in candidate.choices)
    return Point(
        step_s=candidate.step_s,
        needed_gib=candidate.needed_gib,
        layout=f"{sizes or 'DP'}, micro-batch {candidate.sizes['micro_batch']}; {settings}",
    )
