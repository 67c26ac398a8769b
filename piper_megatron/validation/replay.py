"""Replays measured runs: each is estimated as it ran, and compared."""

from collections.abc import Iterable
from dataclasses import dataclass

from piper_megatron.errors import PiperError
from piper_megatron.layout.job import job_of
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.estimate import estimate
from piper_megatron.resources.step import step_time
from piper_megatron.switches import switched_on
from piper_megatron.validation.comparison import TIMES, Comparison, compare
from piper_megatron.validation.order import LayoutGroup, ReadRun, layout_groups
from piper_megatron.validation.runs import Run
from piper_megatron.validation.stack_factors import TimedRun
from piper_megatron.workload.arguments import read_arguments

# load of a busy expert-parallel rank over the mean, where the router was left alone: one value for
# all such runs, of the size that peaks of Megatron-LM's own test runs show
NATURAL_IMBALANCE = 1.15


@dataclass(frozen=True)
class Refusal:
    """A run without a prediction, and why."""

    run: str
    reason: str


@dataclass(frozen=True)
class Replay:
    """What became of all runs.

    Attributes:
        comparisons: of every figure of every run with a prediction.
        refusals: runs that we cannot predict.
        unsized: runs of which nobody knows on how many GPUs they ran.
        timed: runs whose time counts.
        groups: runs that differ in layout alone.
    """

    comparisons: tuple[Comparison, ...]
    refusals: tuple[Refusal, ...]
    unsized: tuple[str, ...]
    timed: tuple[TimedRun, ...]
    groups: tuple[LayoutGroup, ...]


def replay(runs: Iterable[Run]) -> Replay:
    """Predicts every run; one that cannot be predicted is refused, and does not stop the others."""
    comparisons: list[Comparison] = []
    refusals: list[Refusal] = []
    read: list[ReadRun] = []
    unsized = []
    for run in runs:
        if run.ranks is None:
            unsized.append(run.id)
            continue
        try:
            found, timed = _predicted(run, run.ranks)
        except PiperError as error:
            refusals.append(Refusal(run.id, str(error)))
        except Exception as error:
            if switched_on("PIPER_DEBUG"):
                raise
            refusals.append(Refusal(run.id, f"internal error: {type(error).__name__}: {error}"))
        else:
            comparisons += found
            read += timed
    return Replay(
        tuple(comparisons),
        tuple(refusals),
        tuple(unsized),
        tuple(each.timed for each in read),
        tuple(layout_groups(read)),
    )


def _predicted(run: Run, ranks: int) -> tuple[list[Comparison], list[ReadRun]]:
    """Comparisons of a run, and its time where it counts."""
    platform = load_platform(run.platform)
    arguments = read_arguments(run.megatron_args)
    if arguments.unknown:
        raise PiperError(f"arguments not understood: {' '.join(arguments.unknown)}")
    job = job_of(arguments.values, ranks)
    imbalance = NATURAL_IMBALANCE if run.routing == "natural" else 1.0
    stack = platform.need_accelerator().stack(run.stack_description)
    estimated = estimate(job, platform, stack=stack.name, imbalance=imbalance)
    comparisons = compare(run, estimated, platform)
    step_s = plain_s = estimated.time.step_s
    if stack != platform.need_accelerator().stack():
        plain_s = step_time(job, platform, imbalance=imbalance).step_s
    timed = [
        TimedRun(
            run=run.id,
            family=run.family,
            platform=platform.name,
            stack=stack.name,
            measured_s=step_s / (1 + comparison.error),
            predicted_s=step_s,
            plain_s=plain_s,
        )
        for comparison in comparisons
        if comparison.quantity in TIMES and comparison.counts
    ]
    return comparisons, [ReadRun(run, arguments.values, each) for each in timed]
