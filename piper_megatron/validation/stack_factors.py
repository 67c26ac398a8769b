"""Factors of software stacks, and how well they hold for models that they were not fitted to."""

from collections.abc import Iterable, Sequence
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


def fit_factor(runs: Iterable[TimedRun]) -> float | None:
    """What the plain prediction has to be multiplied by; None without runs."""
    ratios = [run.measured_s / run.plain_s for run in runs]
    return median(ratios) if ratios else None


def fitted_errors(runs: Sequence[TimedRun]) -> list[float]:
    """Relative errors with one factor for each platform and stack, fitted to these very runs."""
    errors = []
    for run in runs:
        factor = fit_factor(other for other in runs if _same_stack(run, other))
        assert factor is not None, "a run has its own stack"
        errors.append(_error(run, factor))
    return errors


def held_out_errors(runs: Sequence[TimedRun]) -> list[float]:
    """The same with factors fitted to other families alone.

    Where no other family ran on the stack, the factor is that of the whole platform, and then that
    of all platforms.
    """
    errors = []
    for run in runs:
        others = [other for other in runs if other.family != run.family]
        factors = (
            fit_factor(other for other in others if _same_stack(run, other)),
            fit_factor(other for other in others if other.platform == run.platform),
            fit_factor(others),
        )
        factor = next((factor for factor in factors if factor is not None), None)
        if factor is not None:
            errors.append(_error(run, factor))
    return errors


def _same_stack(run: TimedRun, other: TimedRun) -> bool:
    return (run.platform, run.stack) == (other.platform, other.stack)


def _error(run: TimedRun, factor: float) -> float:
    return run.plain_s * factor / run.measured_s - 1
