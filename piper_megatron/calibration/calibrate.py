"""A platform, corrected by the logs of runs on it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from piper_megatron.calibration.constants import Constant, constants_of, with_reserved_ratio
from piper_megatron.calibration.fit import MODEL_ERROR, Fit, fit_speeds
from piper_megatron.calibration.match import MeasuredRun
from piper_megatron.errors import CalibrationError
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.memory import memory
from piper_megatron.resources.step import step_time

# standard deviations of a doubt, beyond which a correction is called implausible
_PLAUSIBLE = 3.0
# of a step that no correction explains
_FAR_OFF = 0.15
_NOISY = 0.2
# from here on the allocator gives its cache back before it reserves more
_FULL = 0.95
_NOTHING, _LITTLE = 0.001, 0.05


@dataclass(frozen=True)
class Correction:
    """One constant of time, before and after.

    Attributes:
        constant: which, and its number before.
        after: its number.
        speed: over what it was.
        share: of a step that it decides, in the run in which it decides most.
        error: standard error of the speed, as a share of it; None where it stays.
        why: it was fitted, or stays.
    """

    constant: Constant
    after: float
    speed: float
    share: float
    error: float | None
    why: str


@dataclass(frozen=True)
class RankMemory:
    """Largest memory of one rank, GiB = 2^30 bytes."""

    rank: int
    stage: int
    measured_gib: float
    predicted_gib: float
    reserved_gib: float

    @property
    def reserved_ratio(self) -> float:
        """Reserved over allocated."""
        return self.reserved_gib / self.measured_gib


@dataclass(frozen=True)
class RunResult:
    """A run, measured and predicted.

    Attributes:
        run: what was measured.
        before_s, after_s: predicted step, with the platform as it was and as it is now.
        memory: of the ranks that report theirs.
    """

    run: MeasuredRun
    before_s: float
    after_s: float
    memory: tuple[RankMemory, ...]

    @property
    def errors(self) -> tuple[float, float]:
        """Of the predicted step before and after; above 0 where it is too long."""
        measured = self.run.timing.median_s
        return self.before_s / measured - 1, self.after_s / measured - 1


@dataclass(frozen=True)
class Calibration:
    """The result.

    Attributes:
        platform: corrected.
        stack: name of the software stack that it holds for.
        runs: measured and predicted.
        corrections: of every constant of time, those that stay included.
        reserved_ratio: before and after; after is None where no log tells it.
        warnings: what should be looked at before the platform is used.
    """

    platform: Platform
    stack: str
    runs: tuple[RunResult, ...]
    corrections: tuple[Correction, ...]
    reserved_ratio: tuple[float, float | None]
    warnings: tuple[str, ...]


def calibrate(
    platform: Platform,
    runs: Sequence[MeasuredRun],
    *,
    stack: str | None = None,
    when: str,
) -> Calibration:
    """Corrects a platform.

    Args:
        platform: it must have an accelerator.
        runs: on it.
        stack: name or description of their software, see `Accelerator.stack`.
        when: date of the correction, for its source.

    Raises:
        CalibrationError: the runs tell nothing of the platform.
        PlatformError: the platform lacks what a prediction needs.
    """
    constants = constants_of(platform, stack)

    def at(speeds: np.ndarray, note: str) -> Platform:
        changed = platform
        for constant, speed in zip(constants, speeds, strict=True):
            if speed != 1:
                changed = constant.change(changed, float(speed), note)
        return changed

    def steps(there: Platform) -> np.ndarray:
        return np.array(
            [step_time(run.job, there, stack, run.imbalance, run.order).step_s for run in runs]
        )

    fit = fit_speeds(
        lambda logs: steps(at(np.exp(logs), "trial")),
        measured_s=np.array([run.timing.median_s for run in runs]),
        noise=np.array([np.hypot(MODEL_ERROR, run.timing.error) for run in runs]),
        doubts=np.array([constant.doubt for constant in constants]),
    )
    memories = [tuple(_memory(run, platform)) for run in runs]
    ratio = _reserved_ratio(platform, [rank for ranks in memories for rank in ranks])
    if not fit.fitted and ratio is None:
        raise CalibrationError(
            f"the logs tell nothing of platform {platform.name}: {_undecided(constants, fit)}, "
            "and there is no memory report; take a run whose step is longer"
        )
    note = f"{when}, {', '.join(run.log.name for run in runs)}"
    corrected = at(fit.speeds, note)
    if ratio is not None:
        corrected = with_reserved_ratio(corrected, ratio, note)
    results = tuple(
        RunResult(run, float(before), float(after), ranks)
        for run, before, after, ranks in zip(
            runs, steps(platform), steps(corrected), memories, strict=True
        )
    )
    accelerator = platform.need_accelerator()
    return Calibration(
        platform=corrected,
        stack=accelerator.stack(stack).name,
        runs=results,
        corrections=tuple(_corrections(constants, fit)),
        reserved_ratio=(accelerator.overheads.reserved_ratio, ratio),
        warnings=tuple(_warnings(platform, constants, fit, results)),
    )


def _memory(run: MeasuredRun, platform: Platform) -> Iterator[RankMemory]:
    if not run.log.memory:
        return
    predicted = memory(run.job, platform, run.imbalance).stages
    stages = run.job.layout.coordinates()["pp"]
    for rank, report in sorted(run.log.memory.items()):
        if rank < run.job.layout.world:
            stage = int(stages[rank])
            yield RankMemory(
                rank,
                stage,
                report.allocated_gib,
                predicted[stage].peak_gib,
                report.reserved_gib,
            )


def _reserved_ratio(platform: Platform, ranks: Sequence[RankMemory]) -> float | None:
    """Median over the ranks that have memory to spare."""
    capacity = platform.need_accelerator().memory.capacity_gib
    ratios = [rank.reserved_ratio for rank in ranks if rank.reserved_gib < _FULL * capacity]
    return median(ratios) if ratios else None


def _corrections(constants: Sequence[Constant], fit: Fit) -> Iterator[Correction]:
    shares = fit.shares.max(axis=0)
    for place, constant in enumerate(constants):
        fitted = place in fit.fitted
        speed = float(fit.speeds[place])
        yield Correction(
            constant=constant,
            after=constant.corrected(speed),
            speed=speed,
            share=float(shares[place]),
            error=float(fit.errors[place]) if fitted else None,
            why=_why(place, constants, fit),
        )


def _why(place: int, constants: Sequence[Constant], fit: Fit) -> str:
    share = fit.shares[:, place].max()
    if place in fit.fitted:
        if place == fit.fitted[0]:
            return f"fitted: the most doubtful part of the step, {share:.0%} of it"
        return f"fitted: the runs differ in it, up to {share:.0%} of a step"
    if share < _NOTHING:
        return "stays: no step hangs on it"
    if share < _LITTLE:
        return f"stays: at most {share:.0%} of a step hangs on it"
    others = " and ".join(constants[other].name for other in fit.fitted)
    if not others:
        return f"stays: only {share:.0%} of a step hangs on it"
    runs = "one run does" if len(fit.shares) == 1 else "the runs do"
    return f"stays: {runs} not tell it from {others}"


def _undecided(constants: Sequence[Constant], fit: Fit) -> str:
    shares = fit.shares.max(axis=0)
    most = int(shares.argmax())
    return (
        f"no more than {shares[most]:.0%} of a step hangs on one constant ({constants[most].name})"
    )


def _warnings(
    platform: Platform, constants: Sequence[Constant], fit: Fit, results: Sequence[RunResult]
) -> Iterator[str]:
    for place in fit.fitted:
        speed, name = float(fit.speeds[place]), constants[place].name
        most = float(np.exp(_PLAUSIBLE * constants[place].doubt))
        if not 1 / most <= speed <= most:
            yield (
                f"{name}: {speed:.2g} times the speed is implausible, {1 / most:.2g} to {most:.2g} "
                f"can be; the runs may not be of a {platform.name}, or not of these arguments"
            )
    if not fit.fitted:
        yield f"no constant of time was fitted: {_undecided(constants, fit)}"
    for result in results:
        yield from _run_warnings(result)


def _run_warnings(result: RunResult) -> Iterator[str]:
    run = result.run
    if run.timing.spread > _NOISY:
        yield (
            f"{run.log.name}: its steps differ by {run.timing.spread:.0%} between the quartiles; "
            "a quiet machine tells more"
        )
    after = result.errors[1]
    if abs(after) > _FAR_OFF:
        yield (
            f"{run.log.name}: its step is still predicted {abs(after):.0%} too "
            f"{'long' if after > 0 else 'short'}; no constant that the runs tell explains it"
        )
    far = [
        rank for rank in result.memory if abs(rank.predicted_gib / rank.measured_gib - 1) > _FAR_OFF
    ]
    if far:
        worst = max(far, key=lambda rank: abs(np.log(rank.predicted_gib / rank.measured_gib)))
        yield (
            f"{run.log.name}: rank {worst.rank} allocated {worst.measured_gib:.2f} GiB and "
            f"{worst.predicted_gib:.2f} are predicted; no constant corrects that: look at "
            "--imbalance and at the arguments"
        )
