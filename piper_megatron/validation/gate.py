"""Whether the resource model is close enough to the published runs."""

from dataclasses import dataclass

from piper_megatron.validation import limits
from piper_megatron.validation.replay import Replay
from piper_megatron.validation.statistics import peaks, summarise, times


@dataclass(frozen=True)
class Criterion:
    """A figure that must not exceed its limit.

    Attributes:
        name: what the figure is.
        value, limit: a share, or a number of runs.
    """

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the figure is within its limit."""
        return self.value <= self.limit


def criteria(replay: Replay) -> list[Criterion]:
    """All figures that have a limit and runs to tell them from."""
    found = [Criterion("runs refused", len(replay.refusals), 0)]
    memory, step = peaks(replay.comparisons), times(replay.comparisons)
    if memory:
        summary = summarise([each.error for each in memory])
        found += [
            Criterion("peak memory, median error", summary.median, limits.PEAK_MEDIAN),
            Criterion("peak memory, 90th percentile", summary.p90, limits.PEAK_P90),
            Criterion(
                f"peaks off by more than {limits.PEAK_WITHOUT_REASON:.0%} without a reason",
                sum(
                    abs(each.error) > limits.PEAK_WITHOUT_REASON and each.run not in limits.REASONS
                    for each in memory
                ),
                0,
            ),
        ]
    if step:
        summary = summarise([each.error for each in step])
        found += [
            Criterion("time of a step, median error", summary.median, limits.STEP_MEDIAN),
            Criterion("time of a step, 90th percentile", summary.p90, limits.STEP_P90),
        ]
    if replay.groups:
        loss = max(group.loss for group in replay.groups)
        found.append(Criterion("loss by the predicted best layout", loss, limits.ORDER_LOSS))
    return found
