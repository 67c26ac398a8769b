"""The time of a step, from the iterations of a log."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from piper_megatron.calibration.log import Iteration, TrainLog
from piper_megatron.errors import CalibrationError

# iterations of a start that are not like the others: memory is found, kernels and communicators
# are built, the optimizer makes its states
WARM_UP = 3
FEWEST_LINES = 3
# distance from the median in standard deviations, taken from the median distance, from which on a
# time is an outlier (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993)
_FAR = 3.5
_DEVIATIONS = 1.4826  # of a normal distribution, over its median distance
_SMALLEST_DEVIATION = 0.005  # of the median, so that equal times make no outliers of the others
_QUARTILES = 1.349  # between the quartiles of a normal distribution, in standard deviations
_MEDIAN_ERROR = 1.2533  # of the median over that of the mean
_MOST_SKIPPED = 0.1


@dataclass(frozen=True)
class StepTiming:
    """Measured step time.

    Attributes:
        median_s: of the lines that count.
        spread: between their quartiles, as a share of the median.
        lines: that count.
        warm_up, outliers, skipped, other_batches: lines that do not.
    """

    median_s: float
    spread: float
    lines: int
    warm_up: int = 0
    outliers: int = 0
    skipped: int = 0
    other_batches: int = 0

    @property
    def error(self) -> float:
        """Standard error of the median, as a share of it."""
        return _MEDIAN_ERROR * self.spread / _QUARTILES / self.lines**0.5


def step_timing(log: TrainLog, global_batch: int) -> StepTiming:
    """The time that a step takes once the training runs.

    Args:
        log: its iterations.
        global_batch: sequences of a step; lines of a smaller batch (ramp-up) do not count.

    Raises:
        CalibrationError: too few lines, another batch, or iterations that went wrong.
    """
    every = [line for session in log.sessions for line in session]
    if not every:
        raise CalibrationError(
            f"{log.name} has no line of an iteration ('iteration 10/ 500 | ... elapsed time per "
            "iteration (ms): ...'); give the output of the last rank, which prints them"
        )
    _refuse_broken(log.name, every)
    batches = {line.global_batch for line in every if line.global_batch is not None}
    if batches and global_batch not in batches:
        raise CalibrationError(
            f"{log.name} has a global batch size of {max(batches)}, the arguments one of "
            f"{global_batch}; give the arguments of that run"
        )
    of_batch = [
        line
        for session in log.sessions
        for line in _behind_warm_up(session)
        if line.global_batch in (None, global_batch)
    ]
    warm = sum(1 for session in log.sessions for _ in _behind_warm_up(session))
    full = [line for line in of_batch if not line.skipped]
    if len(full) < FEWEST_LINES:
        raise CalibrationError(
            f"{log.name} has {len(full)} lines of whole iterations behind the first {WARM_UP} "
            f"of a start, which are its warm-up; {FEWEST_LINES} are needed: train longer, or set a "
            "smaller --log-interval"
        )
    _refuse_skipped(log.name, of_batch, full)
    times = np.array([line.elapsed_s for line in full])
    kept = times[~_outliers(times)]
    low, median, high = (float(q) for q in np.percentile(kept, [25, 50, 75]))
    return StepTiming(
        median_s=median,
        spread=(high - low) / median,
        lines=len(kept),
        warm_up=len(every) - warm,
        outliers=len(times) - len(kept),
        skipped=len(of_batch) - len(full),
        other_batches=warm - len(of_batch),
    )


def _refuse_broken(name: str, lines: list[Iteration]) -> None:
    for line in lines:
        if line.nan:
            raise CalibrationError(
                f"{name}: {line.nan} iterations up to {line.number} have a loss that is not a "
                "number; the time of such a training says nothing"
            )
        if line.elapsed_s <= 0:
            raise CalibrationError(
                f"{name}: iteration {line.number} took {line.elapsed_s * 1e3:g} ms; the log is "
                "damaged"
            )


def _refuse_skipped(name: str, of_batch: list[Iteration], full: list[Iteration]) -> None:
    """Those before the first whole line search the loss scale, and are not counted."""
    later = of_batch[of_batch.index(full[0]) :]
    skipped = sum(1 for line in later if line.skipped)
    if skipped > _MOST_SKIPPED * len(later):
        raise CalibrationError(
            f"{name}: {skipped} of {len(later)} lines have skipped iterations, in which no "
            "optimizer step is done; give the log of a training that is stable"
        )


def _behind_warm_up(session: list[Iteration]) -> Iterator[Iteration]:
    """Lines that are about iterations behind the warm-up alone.

    The first line of a start does not reset the clock, so the second is about the same iterations.
    """
    for before, line in itertools.pairwise(session):
        if before.number - session[0].number + 1 >= WARM_UP:
            yield line


def _outliers(times: np.ndarray) -> np.ndarray:
    median = np.median(times)
    distance = np.abs(times - median)
    deviation = max(_DEVIATIONS * float(np.median(distance)), _SMALLEST_DEVIATION * float(median))
    return distance > _FAR * deviation
