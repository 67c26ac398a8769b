"""An estimate as text: the verdict, memory by stage, time by part, assumptions and evidence."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.table import Table

from piper_megatron.layout.job import Job
from piper_megatron.report.text import count, facts, percent, render, seconds, table
from piper_megatron.resources.estimate import Estimate, Memory, StageMemory

# a prediction beyond this multiple of the device is called out: no small change will mend it
FAR_TOO_LARGE = 2.0
MEMORY_COLUMNS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "dispatch",
    "logits",
    "buffers",
)


def render_estimate(
    estimate: Estimate, job: Job, platform: str, width: int, unknown: Sequence[str] = ()
) -> str:
    """The whole report, plain text.

    Args:
        estimate: what to show.
        job: what it was made for.
        platform: its name.
        width: columns of the terminal.
        unknown: tokens of the command that Megatron does not know.
    """
    notes = [("assumed", text) for text in estimate.assumptions]
    if unknown:
        notes.append(("not read", f"{' '.join(unknown)}: no option of Megatron's"))
    return render(
        [
            "\n".join([verdict(estimate.memory), *_headlines(estimate, job, platform)]),
            _memory_table(estimate.memory.stages),
            _time_table(estimate.time.parts, estimate.time.step_s),
            facts(notes, width),
            facts(_by_label(estimate.evidence), width),
        ]
    )


def verdict(memory: Memory) -> str:
    """One line: whether it fits, where it is fullest, and by how much it misses."""
    worst = memory.stages[memory.worst_stage]
    needed = worst.needed_gib
    where = f"{needed:.1f} GiB of the device on stage {memory.worst_stage}"
    if memory.fits:
        return f"fits: needs {where}, has {memory.capacity_gib:.1f} GiB"
    times = needed / memory.capacity_gib
    if times >= FAR_TOO_LARGE:
        return (
            f"DOES NOT FIT: needs {where}, {times:.1f} times the {memory.capacity_gib:.1f} GiB "
            "that it has; the times below are of a job that cannot run"
        )
    return f"DOES NOT FIT: needs {where}, has {memory.capacity_gib:.1f} GiB"


def parallel_sizes(job: Job) -> str:
    """Parallel sizes in one line: TP 1, CP 1, PP 2, DP 4."""
    layout = job.layout
    sizes = [f"{name.upper()} {getattr(layout, name)}" for name in ("tp", "cp", "pp")]
    sizes += [f"VPP {job.pipeline.vpp}"] if job.pipeline.vpp > 1 else []
    sizes += [f"EP {layout.ep}", f"ETP {layout.etp}"] if job.model.experts else []
    sizes += [f"DP {layout.dp}"]
    sizes += [f"EDP {layout.edp}"] if job.model.experts else []
    return ", ".join(sizes)


def _headlines(estimate: Estimate, job: Job, platform: str) -> list[str]:
    time, layout, batch = estimate.time, job.layout, job.batch
    return [
        f"step {seconds(time.step_s)}, {time.tflops_per_gpu:.1f} TFLOPS/GPU, MFU {time.mfu:.1%}, "
        f"{time.tokens_per_s_per_gpu:,.0f} tokens/s/GPU",
        f"{job.model.name}: {estimate.parameters.total / 1e9:,.2f}B parameters, "
        f"{estimate.parameters.active / 1e9:,.2f}B active",
        f"{count(layout.world, 'rank')} of {platform}: {parallel_sizes(job)}; "
        f"{batch.global_batch:,} sequences of {batch.seq:,} tokens, "
        f"{count(int(job.sizes.micro_batches), 'micro-batch')} of "
        f"{batch.micro_batch}",
    ]


def _memory_table(stages: Sequence[StageMemory]) -> Table:
    totals = ("peak", "outside", "needed")
    shown = table("stage", *MEMORY_COLUMNS, *totals, "peak is in", left=(0, 11))
    for stage in stages:
        parts = [getattr(stage, f"{name}_gib") for name in MEMORY_COLUMNS]
        phase = max(stage.peaks_gib, key=lambda name: stage.peaks_gib[name])
        parts += [stage.peak_gib, stage.communicators_gib, stage.needed_gib]
        shown.add_row(str(stage.stage), *(f"{gib:.2f}" for gib in parts), phase)
    return shown


def _time_table(parts: Mapping[str, float], step_s: float) -> Table:
    shown = table("part of the step", "time", "share")
    for name, spent in parts.items():
        if spent:
            shown.add_row(name, seconds(spent), percent(spent / step_s))
    return shown


def _by_label(evidence: Mapping[str, str]) -> list[tuple[str, str]]:
    names: dict[str, list[str]] = defaultdict(list)
    for name, label in evidence.items():
        names[label].append(name)
    return [(label, ", ".join(listed)) for label, listed in names.items()]
