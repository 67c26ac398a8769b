"""Factors of software stacks, and how well they hold for models that they were not fitted to."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """A run whose time was measured.

    Attributes:
        run: id.
        family: of the model.
        platform, stack: where it ran, and by which of the platform's software stacks.
        measured_s: of a step.
        predicted_s: with the platform's factor for the stack.
        plain_s: predicted as if the platform had no other software than its default.
    """

    run: str
    family: str
    platform: str
    stack: str
    measured_s: float
    predicted_s: float
    plain_s: float


Stack = tuple[str, str]  # platform, software stack


def fit_factors(runs: Iterable[TimedRun]) -> dict[Stack, float]:
    """For each platform and stack, what the plain prediction has to be multiplied by."""
    return _median_ratios(runs, lambda run: (run.platform, run.stack))


def fitted_errors(runs: Sequence[TimedRun]) -> list[float]:
    """Relative errors with factors fitted to these very runs."""
    factors = fit_factors(runs)
    return [_error(run, factors[run.platform, run.stack]) for run in runs]


def held_out_errors(runs: Sequence[TimedRun]) -> list[float]:
    """Relative errors with factors fitted to all families but the run's own.

    Where no other family ran on the stack, the factor is that of the whole platform, and then that
    of all platforms.
    """
    errors = []
    for family in dict.fromkeys(run.family for run in runs):
        others = [run for run in runs if run.family != family]
        if not others:
            continue
        stacks = fit_factors(others)
        platforms = _median_ratios(others, lambda run: run.platform)
        everywhere = _median_ratios(others, lambda run: "")[""]
        for run in runs:
            if run.family == family:
                anywhere = platforms.get(run.platform, everywhere)
                errors.append(_error(run, stacks.get((run.platform, run.stack), anywhere)))
    return errors


def _median_ratios[Key](
    runs: Iterable[TimedRun], group: Callable[[TimedRun], Key]
) -> dict[Key, float]:
    """Measured over plain prediction, the median of each group."""
    ratios: dict[Key, list[float]] = defaultdict(list)
    for run in runs:
        ratios[group(run)].append(run.measured_s / run.plain_s)
    return {key: median(found) for key, found in ratios.items()}


def _error(run: TimedRun, factor: float) -> float:
    return run.plain_s * factor / run.measured_s - 1
