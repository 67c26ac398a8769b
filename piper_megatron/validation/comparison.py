"""What was measured of a run beside the prediction that it corresponds to."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from piper_megatron.platform.platform import Platform
from piper_megatron.resources.estimate import Estimate, StageMemory
from piper_megatron.validation.limits import LAUNCH_BOUND_FAMILIES, OTHER_FLOP_COUNT
from piper_megatron.validation.runs import Run

Quantity = Literal[
    "peak_gib",
    "resident_gib",
    "reserved_gib",
    "step_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu_pct",
]
# in order of preference: a run counts once in statistics of time
TIMES: tuple[Quantity, ...] = ("step_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct")

_PEAK_TFLOPS = re.compile(r"(?:MFU against|peak) (\d+(?:\.\d+)?)")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measured figure and ours.

    Attributes:
        run: id.
        family, platform, confidence: of the run.
        quantity: a key of the measurement.
        measured, predicted: in the quantity's unit.
        where: the pipeline stage, for memory.
        excluded: why it counts in no statistic; empty where it does.
        repeated: another figure says the same time, and is the one that counts.
    """

    run: str
    family: str
    platform: str
    confidence: str
    quantity: Quantity
    measured: float
    predicted: float
    where: str = ""
    excluded: str = ""
    repeated: bool = False

    @property
    def counts(self) -> bool:
        """Whether statistics over several quantities hold it."""
        return not self.excluded and not self.repeated

    @property
    def error(self) -> float:
        """Relative error of the cost: above 0 where we predict more memory or more time."""
        if self.quantity in TIMES and self.quantity != "step_s":
            return self.measured / self.predicted - 1
        return self.predicted / self.measured - 1


def compare(run: Run, estimate: Estimate, platform: Platform) -> list[Comparison]:
    """All figures of a run beside ours."""
    return [*_memory(run, estimate, platform), *_times(run, estimate)]


def _comparison(
    run: Run, quantity: Quantity, measured: float, predicted: float, **more: Any
) -> Comparison:
    return Comparison(
        run=run.id,
        family=run.family,
        platform=run.platform,
        confidence=run.confidence,
        quantity=quantity,
        measured=measured,
        predicted=predicted,
        **more,
    )


def _memory(run: Run, estimate: Estimate, platform: Platform) -> Iterator[Comparison]:
    measured, stages = run.measured, estimate.memory.stages
    where, candidates = _measured_stages(run, stages)
    if measured.peak_gib_by_stage:
        ends = {"0": stages[0], "last": stages[-1]}
        for name, gib in measured.peak_gib_by_stage.items():
            yield _comparison(run, "peak_gib", gib, ends[name].peak_gib, where=name)
    elif measured.peak_gib:
        predicted = max(stage.peak_gib for stage in candidates)
        yield _comparison(run, "peak_gib", measured.peak_gib, predicted, where=where)
    if measured.resident_gib:
        predicted = max(stage.resident_gib for stage in candidates)
        yield _comparison(run, "resident_gib", measured.resident_gib, predicted, where=where)
    if measured.reserved_gib:
        outside = _reports_device_memory(platform)
        predicted = max(
            stage.reserved_gib + outside * stage.communicators_gib for stage in candidates
        )
        yield _comparison(run, "reserved_gib", measured.reserved_gib, predicted, where=where)


def _measured_stages(
    run: Run, stages: tuple[StageMemory, ...]
) -> tuple[str, tuple[StageMemory, ...]]:
    """Stages that the measured rank may belong to; the largest of them is compared."""
    rank = run.measured.peak_rank or ""
    if rank.startswith("last"):
        return "last", stages[-1:]
    if rank == "rank 0":
        return "0", stages[:1]
    return "worst", stages


def _reports_device_memory(platform: Platform) -> bool:
    """Whether `reserved_gib` holds all memory in use: what tools of AMD report."""
    return platform.need_accelerator().name.startswith("AMD")


def _times(run: Run, estimate: Estimate) -> Iterator[Comparison]:
    time = estimate.time
    peak_tflops = _PEAK_TFLOPS.search(run.metric_notes)
    mfu = time.tflops_per_gpu / float(peak_tflops[1]) if peak_tflops else time.mfu
    predictions = {
        "step_s": time.step_s,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "tflops_per_gpu": time.tflops_per_gpu,
        "mfu_pct": 100 * mfu,
    }
    counted = False
    for quantity in TIMES:
        measured = getattr(run.measured, quantity)
        if measured is None:
            continue
        excluded = _not_comparable(run, quantity)
        yield _comparison(
            run, quantity, measured, predictions[quantity], excluded=excluded, repeated=counted
        )
        counted = counted or not excluded


def _not_comparable(run: Run, quantity: Quantity) -> str:
    """Why a time says nothing; empty where it does."""
    if run.family in LAUNCH_BOUND_FAMILIES:
        return "bound by the host"
    if run.family in OTHER_FLOP_COUNT and quantity in ("tflops_per_gpu", "mfu_pct"):
        return "operations are counted differently"
    return ""
