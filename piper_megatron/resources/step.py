"""The time of a training step: passes, pipeline, gradients and optimizer put together."""

from collections.abc import Sequence
from dataclasses import dataclass

from piper_megatron.layout.job import Job
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.chunk_time import ChunkClock, ChunkTime
from piper_megatron.resources.communication import Order, boundary_seconds
from piper_megatron.resources.estimate import Time
from piper_megatron.resources.flops import flops_utilisation, step_flops
from piper_megatron.resources.layer_time import Machine, Seconds, add, scaled, total
from piper_megatron.resources.replica_time import ReplicaTime
from piper_megatron.resources.schedule import PassTimes, Timeline, schedule_of, simulate
from piper_megatron.workload.spec import TrainingSpec

# in the order of a report
PARTS = (
    "attention",
    "experts",
    "mlp",
    "other",
    "head",
    "recompute",
    "tp",
    "cp",
    "dispatch",
    "host",
    "pp_bubble",
    "pp_p2p",
    "dp",
    "optimizer",
)


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, and why.

    Attributes:
        time: what an estimate shows.
        timeline: of the pipeline.
        after_s: what follows on all stages until the step's end, in order.
        worst_stage: the stage that works longest, of which the parts are.
    """

    time: Time
    timeline: Timeline
    after_s: dict[str, float]
    worst_stage: int

    @property
    def step_s(self) -> float:
        """From one optimizer step to the next."""
        return self.time.step_s

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part; they add up to `step_s`."""
        return self.time.parts


def step_time(
    job: Job,
    platform: Platform,
    stack: str | None = None,
    imbalance: float = 1.0,
    order: Order = "megatron",
) -> StepTime:
    """The time of a step.

    Args:
        job: what is trained and how.
        platform: whose curves hold; it must have an accelerator.
        stack: name or description of the software, see `Accelerator.stack`.
        imbalance: rows of the most loaded rank's experts over the mean.
        order: of the ranks on the devices.

    Raises:
        LayoutError: Megatron's schedule refuses the number of micro-batches.
        PlatformError: the platform has no accelerator, or that lacks the precision.
    """
    machine = Machine(
        platform=platform, stack=platform.need_accelerator().stack(stack), order=order
    )
    clock = ChunkClock(job, machine, imbalance)
    chunks = [[clock.chunk(chunk) for chunk in stage] for stage in job.pipeline.stages]
    replicas = ReplicaTime(job, machine)
    times = _pass_times(job, machine, chunks, replicas)
    timeline = simulate(schedule_of(job), times)

    after_s: dict[str, float] = {
        "gradients": replicas.reduced_s(timeline) - timeline.step_s + replicas.norm_s,
        "optimizer": replicas.optimizer_s,
        "parameters": replicas.gathered_after_s,
    }
    worst = int(timeline.working_s.argmax())
    parts = add(
        dict.fromkeys(PARTS, 0.0),
        _working_parts(job, chunks[worst], times, worst, float(timeline.working_s[worst])),
        {
            "pp_bubble": float(timeline.idle_s[worst]),
            "pp_p2p": float(timeline.sending_s[worst]),
            "dp": float(timeline.gathering_s[worst]),
        },
        {"dp": after_s["gradients"] + after_s["parameters"], "optimizer": after_s["optimizer"]},
    )
    step_s = timeline.step_s + sum(after_s.values())
    return StepTime(
        _time(job, machine, step_s, {name: float(spent) for name, spent in parts.items()}),
        timeline,
        after_s,
        worst,
    )


def _time(job: Job, machine: Machine, step_s: float, parts: dict[str, float]) -> Time:
    world, training = job.layout.world, job.training
    precision = "fp4" if training.fp4 else "fp8" if training.fp8 else training.precision
    flops, xmoe_flops = (step_flops(job, name) / world for name in ("megatron", "xmoe"))
    return Time(
        step_s=step_s,
        tflops_per_gpu=flops / step_s / 1e12,
        mfu=flops_utilisation(flops, step_s, machine.accelerator.peak_flops(precision)),
        xmoe_tflops_per_gpu=xmoe_flops / step_s / 1e12,
        tokens_per_s_per_gpu=job.batch.global_batch * job.batch.seq / step_s / world,
        parts=parts,
    )


def _pass_times(
    job: Job, machine: Machine, chunks: list[list[ChunkTime]], replicas: ReplicaTime
) -> PassTimes:
    training = job.training
    wgrad_s = together_s = None
    if training.overlap_moe_expert_parallel_comm:
        together_s = _together_s(chunks, training)
        if training.delay_wgrad_compute:
            wgrad_s = [[chunk.last_weight_s for chunk in stage] for stage in chunks]
    forward_s, backward_s = (
        [
            [
                spent + replicas.every_pass_s(p, v, phase, spent)
                for v, spent in enumerate(float(total(getattr(chunk, phase))) for chunk in stage)
            ]
            for p, stage in enumerate(chunks)
        ]
        for phase in ("forward", "backward")
    )
    boundary_s = boundary_seconds(
        job.model, training, job.sizes, machine.platform, order=machine.order
    )
    return PassTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        p2p_s=[float(boundary_s)] * job.layout.pp,
        wgrad_s=wgrad_s,
        together_s=together_s,
        gathered_s=replicas.gathered_before_s,
    )


def _together_s(chunks: list[list[ChunkTime]], training: TrainingSpec) -> list[list[list[float]]]:
    """[PP][VPP][VPP] of a forward pass beside a backward pass; chunks alike are paired once."""
    known: dict[tuple[int, int], float] = {}

    def pair_s(forward: ChunkTime, backward: ChunkTime) -> float:
        key = id(forward), id(backward)
        if key not in known:
            known[key] = forward.beside_s(backward, training)
        return known[key]

    return [[[pair_s(one, other) for other in stage] for one in stage] for stage in chunks]


def _working_parts(
    job: Job, chunks: Sequence[ChunkTime], times: PassTimes, stage: int, working_s: float
) -> Seconds:
    """A stage's work by part.

    What sharded parameters add to passes (FSDP) is `dp`; what is missing since passes ran side by
    side was hidden of the experts' exchanges.
    """
    alone = add(*(chunk.forward for chunk in chunks), *(chunk.backward for chunk in chunks))
    passes_s = sum(times.forward_s[stage]) + sum(times.backward_s[stage])
    parts = add(alone, {"dp": passes_s - total(alone)})
    parts = scaled(parts, int(job.sizes.micro_batches))
    return add(parts, {"dispatch": working_s - total(parts)})
