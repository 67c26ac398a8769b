"""The best candidates worked out pass by pass; those that need too much have a second chance."""

from collections.abc import Sequence

from piper_megatron.tuning.finalist import WorkedOut, worked_out
from piper_megatron.tuning.parts import Run
from piper_megatron.tuning.score import Candidate, Scores
from piper_megatron.tuning.task import Task

# more finalists than plans: the closed form errs by a few percent
FINALISTS = 12
NOT_LEGAL = "stage: finalists that the check refuses, "
NOT_FITTING = "stage: finalists that do not fit pass by pass"


def shortlist(
    task: Task, scores: Scores, limit: float, run: Run, *, smallest: bool, top: int
) -> list[WorkedOut]:
    """The best that fit, one of each layout.

    Args:
        task: what is tuned.
        scores: of its candidates in closed form; what is refused here is added to them.
        limit: GiB of the device that a plan may need.
        run: runs parts of the work.
        smallest: the smallest are wanted, not the quickest.
        top: how many.
    """
    order = scores.leanest if smallest else scores.best
    places = range(min(len(order), max(FINALISTS, top)))
    found = _all(task, scores, [order[place] for place in places], limit, run, smallest)
    # the closed form's figure that stands for the limit where more is needed than it says
    tighter = {
        place: limit * each.candidate.needed_gib / each.needed_gib
        for place, each in zip(places, found, strict=True)
        if each is not None and each.needed_gib > limit
    }
    scores.rejected[NOT_FITTING] += len(tighter)
    if tighter and not smallest:
        found += _all(task, scores, order.within(tighter, run), limit, run, smallest)
    fitting = [each for each in found if each is not None and each.needed_gib <= limit]
    return sorted(fitting, key=lambda each: each.needed_gib if smallest else each.step_s)[:top]


def _all(
    task: Task,
    scores: Scores,
    candidates: Sequence[Candidate],
    limit: float,
    run: Run,
    smallest: bool,
) -> list[WorkedOut | None]:
    """Each worked out; None where the check refuses it."""
    work = [(task, candidate, 0.0 if smallest else limit) for candidate in candidates]
    found = run("finalists", worked_out, work)
    for each in found:
        if isinstance(each, str):
            scores.rejected[NOT_LEGAL + each] += 1
    return [None if isinstance(each, str) else each for each in found]
