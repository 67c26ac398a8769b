"""The search: all candidates in closed form, the best of them event by event."""

import time
from dataclasses import replace
from typing import Literal

import numpy as np

from piper_megatron.errors import WorkloadError
from piper_megatron.resources.estimate import Estimate
from piper_megatron.strict import StrictModel
from piper_megatron.tuning.finalist import Finalist, estimated, finalists, plan
from piper_megatron.tuning.limit import limit_gib
from piper_megatron.tuning.parts import Progress, Run, workers
from piper_megatron.tuning.plan import Plan
from piper_megatron.tuning.score import Candidate, Scores, fits, score
from piper_megatron.tuning.space import culprits, divisors, layouts
from piper_megatron.tuning.task import Task
from piper_megatron.workload.flags import spelling_of

Objective = Literal["time", "memory", "gpus"]
# candidates of the front may be so many times slower than the best
SLACK = 1.25
# more finalists than plans: the closed form errs by a few percent
FINALISTS = 8
MOST_GPUS = 64  # times the GPUs there are, where nothing fits
NOT_LEGAL = "refused by check: "
NOT_FITTING = "finalists that do not fit after all"


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
    notes = _notes(task)
    if objective == "gpus":
        task = _fewest(task, margin)
        notes.append(f"{task.gpus:,} GPUs are the fewest on which it fits")
    space = layouts(task)
    if not len(space):
        raise _no_layout(task, space.refusal)
    limit = limit_gib(task.platform, margin)
    slack = np.inf if objective == "memory" else SLACK
    with workers(processes, progress) as run:
        scores = score(task, space, limit, slack, run)
        plans = _plans(task, scores, objective, limit, top, run, name)
    nearest, advice = (None, "") if plans else _nearest(task, scores, margin, name)
    return Outcome(
        plans=tuple(plans),
        nearest=nearest,
        advice=advice,
        front=tuple(map(_point, scores.front)),
        rejected=dict(scores.rejected.most_common()),
        searched=scores.searched,
        legal=scores.legal,
        limit_gib=limit,
        seconds=time.perf_counter() - began,
        notes=tuple(notes),
    )


def _plans(
    task: Task,
    scores: Scores,
    objective: Objective,
    limit: float,
    top: int,
    run: Run,
    name: str,
) -> list[Plan]:
    """The best candidates as plans, one of each layout."""
    order = scores.leanest if objective == "memory" else scores.best
    candidates = [order[place] for place in range(min(len(order), max(FINALISTS, top)))]
    candidates = [each for each in candidates if each.needed_gib <= limit]
    legal: list[list[Finalist]] = []
    for ways in run("finalists", finalists, [(task, candidate) for candidate in candidates]):
        if isinstance(ways, str):
            scores.rejected[NOT_LEGAL + ways] += 1
        else:
            legal.append(ways)
    if objective != "memory":
        legal.sort(key=lambda ways: ways[0].step_s)
    chosen: list[tuple[Finalist, Estimate]] = []
    while legal and len(chosen) < top:
        some, legal = legal[: top - len(chosen)], legal[top - len(chosen) :]
        for found in run("estimates", estimated, [(task, ways, limit) for ways in some]):
            if found is None:
                scores.rejected[NOT_FITTING] += 1
            else:
                chosen.append(found)
    if objective == "memory":
        chosen.sort(key=lambda each: each[1].memory.peak_gib)
    else:
        chosen.sort(key=lambda each: each[1].time.step_s)
    return [plan(task, *each, rank, name) for rank, each in enumerate(chosen, start=1)]


def _nearest(task: Task, scores: Scores, margin: float, name: str) -> tuple[Plan | None, str]:
    """What comes closest where nothing fits, and on how many GPUs something would."""
    for place in range(min(len(scores.leanest), FINALISTS)):
        ways = finalists(task, scores.leanest[place])
        found = None if isinstance(ways, str) else estimated(task, ways)
        if found is not None:
            return plan(task, *found, 1, name), _advice(task, margin)
    return None, "none of the candidates that come closest is one that Megatron would take"


def _advice(task: Task, margin: float) -> str:
    for times in (2, 4, 8, 16, 32, MOST_GPUS):
        if _fits(replace(task, gpus=task.gpus * times), margin):
            return f"it would fit on {task.gpus * times:,} GPUs"
    return f"it would not fit on {task.gpus * MOST_GPUS:,} GPUs either"


def _fits(task: Task, margin: float) -> bool:
    space = layouts(task)
    return len(space) > 0 and fits(task, space, limit_gib(task.platform, margin))


def _fewest(task: Task, margin: float) -> Task:
    """The task on the fewest of its GPUs with which it fits: whole nodes, or parts of one."""
    node = task.platform.ranks_per_node
    counts = [*divisors(node), *range(2 * node, task.gpus + 1, node)]
    for gpus in counts:
        if gpus <= task.gpus and _fits(replace(task, gpus=gpus), margin):
            return replace(task, gpus=gpus)
    return task


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


def _notes(task: Task) -> list[str]:
    node, notes = task.platform.ranks_per_node, []
    if task.gpus > node and task.gpus % node:
        notes.append(
            f"{task.gpus:,} GPUs are no whole number of nodes of {node}; the last node is taken "
            "as shared"
        )
    if task.imbalance == 1 and task.model.experts:
        notes.append("experts are taken as evenly loaded (--imbalance)")
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
