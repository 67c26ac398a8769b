"""Statistics of relative errors."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from piper_megatron.validation.comparison import TIMES, Comparison


@dataclass(frozen=True)
class Summary:
    """Of some relative errors.

    Attributes:
        count: of them.
        median, p90, worst: of their sizes; percentile 90 is interpolated.
        bias: median of the errors with their signs; above 0 where we predict too much.
    """

    count: int
    median: float
    p90: float
    worst: float
    bias: float


def summarise(errors: Sequence[float]) -> Summary:
    """Statistics of at least one error."""
    sizes = np.abs(errors)
    return Summary(
        count=len(errors),
        median=float(np.median(sizes)),
        p90=float(np.percentile(sizes, 90)),
        worst=float(sizes.max()),
        bias=float(np.median(errors)),
    )


def by(comparisons: Iterable[Comparison], group: Callable[[Comparison], str]) -> dict[str, Summary]:
    """A summary for each group of comparisons that count, in the order of their first member."""
    errors: dict[str, list[float]] = defaultdict(list)
    for comparison in comparisons:
        errors[group(comparison)].append(comparison.error)
    return {name: summarise(found) for name, found in errors.items()}


def peaks(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """Peak memory, of runs whose arguments are known well enough."""
    return [c for c in comparisons if c.quantity == "peak_gib" and c.confidence != "low"]


def times(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The time of each run, once."""
    return [c for c in comparisons if c.quantity in TIMES and c.counts]
