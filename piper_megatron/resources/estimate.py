"""The estimate: what a job will need, as reports and JSON show it."""

from typing import TYPE_CHECKING

from piper_megatron.strict import StrictModel

if TYPE_CHECKING:
    from piper_megatron.layout.job import Job
    from piper_megatron.platform.platform import Platform
    from piper_megatron.resources.reach import Order

GIB = 2**30


class Parameters(StrictModel):
    """Parameter counts.

    Attributes:
        total: of the whole model, every weight once, with the unpadded vocabulary.
        active: of those, the ones that a token meets.
        per_stage: on one rank of each stage.
    """

    total: int
    active: int
    per_stage: tuple[int, ...]


class StageMemory(StrictModel):
    """Device memory of the most loaded rank of one stage, GiB = 2^30 bytes.

    Attributes:
        stage: pipeline rank.
        weights_gib, gradients_gib, optimizer_gib: resident between steps.
        activations_gib: saved for the backward pass when the peak is reached, routed rows apart.
        logits_gib: output layer and loss when the peak is reached.
        dispatch_gib: routed rows of experts and their exchange when the peak is reached.
        buffers_gib: what is allocated once and stays: workspaces, gathered inputs, counters.
        communicators_gib: buffers of NCCL or RCCL and the device context, outside torch's
            allocator.
        resident_gib: what torch.cuda.memory_allocated would say between steps.
        peak_gib: what torch.cuda.max_memory_allocated would say.
        reserved_gib: what torch.cuda.max_memory_reserved would say where memory is plenty.
        needed_gib: what the job cannot do without: peak, some fragments of the allocator's cache,
            and what is outside of it.
        peaks_gib: the largest allocation in each phase of a step; `peak_gib` is their maximum.
    """

    stage: int
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    logits_gib: float
    dispatch_gib: float
    buffers_gib: float
    communicators_gib: float
    needed_gib: float
    resident_gib: float
    peak_gib: float
    reserved_gib: float
    peaks_gib: dict[str, float]


class Memory(StrictModel):
    """Memory of a job.

    Attributes:
        stages: one for every pipeline rank.
        peak_gib, worst_stage: the largest of them.
        capacity_gib: of the device; None without a platform's.
        fits: what every stage needs is within the capacity.
    """

    stages: tuple[StageMemory, ...]
    peak_gib: float
    worst_stage: int
    capacity_gib: float
    fits: bool


class Time(StrictModel):
    """Time of a training step.

    Attributes:
        step_s: from one optimizer step to the next.
        tflops_per_gpu, mfu: by Megatron's count of floating-point operations, 1e12 a second; the
            share of the device's dense peak in the training precision.
        xmoe_tflops_per_gpu: the same step by X-MoE's count.
        tokens_per_s_per_gpu: of the whole sequence, padding included.
        parts: seconds of the slowest stage by part; they add up to `step_s`.
    """

    step_s: float
    tflops_per_gpu: float
    mfu: float
    xmoe_tflops_per_gpu: float
    tokens_per_s_per_gpu: float
    parts: dict[str, float]


class Estimate(StrictModel):
    """All of it, with what was assumed and where the machine's numbers come from.

    Attributes:
        assumptions: one sentence each.
        evidence: number of the platform -> measured, published, fitted or assumed.
    """

    parameters: Parameters
    memory: Memory
    time: Time
    assumptions: tuple[str, ...]
    evidence: dict[str, str]


def estimate(
    job: "Job",
    platform: "Platform",
    *,
    stack: str | None = None,
    imbalance: float = 1.0,
    order: "Order" = "megatron",
) -> Estimate:
    """What a job will need on a platform.

    Args:
        job: what is trained and how.
        platform: where.
        stack: name or description of the software, see `Accelerator.stack`; None for the default.
        imbalance: rows on the most loaded expert rank over the mean.
        order: of the ranks on the devices.

    Raises:
        PlatformError: the platform does not describe its accelerator, or lacks the precision.
        LayoutError: the micro-batches cannot be scheduled.
    """
    from piper_megatron.resources.assumptions import assumptions
    from piper_megatron.resources.memory import memory
    from piper_megatron.resources.parameters import (
        active_parameters,
        parameter_counts,
        total_parameters,
    )
    from piper_megatron.resources.step import step_time

    stages = parameter_counts(job)
    return Estimate(
        parameters=Parameters(
            total=total_parameters(job.model),
            active=active_parameters(job.model),
            per_stage=tuple(int(sum(chunk.total for chunk in stage)) for stage in stages),
        ),
        memory=memory(job, platform, imbalance),
        time=step_time(job, platform, stack, imbalance, order).time,
        assumptions=assumptions(job, platform, stack, imbalance, order),
        evidence=platform.evidence(),
    )
