"""Whether a job fits into the memory of its GPUs, and what would make it fit."""

import argparse
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from piper_megatron.check.changes import Change, changes, full_recomputation, scaled
from piper_megatron.check.command import Command
from piper_megatron.check.finding import Finding
from piper_megatron.errors import PiperError
from piper_megatron.layout.job import job_of
from piper_megatron.resources.estimate import StageMemory
from piper_megatron.resources.memory import memory
from piper_megatron.resources.step import step_time

SOURCE = "prediction of piper_megatron, docs/estimate.md"
FAR_TOO_LARGE = 2.0  # times the device's memory
SHOWN = 3
PAIRED = 5  # changes that are tried together, the most saving first
MOST_GPUS = 64  # times those of the command
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "dispatch": "routed rows of experts",
    "logits": "logits and loss",
}

Legal = Callable[[Command], bool]


@dataclass(frozen=True)
class Trial:
    """A change and what it would bring.

    Attributes:
        change: what was changed.
        needed_gib: device memory of the fullest stage.
        step_s: step time where it fits, else None.
        gpus: ranks.
    """

    change: Change
    needed_gib: float
    step_s: float | None
    gpus: int

    @property
    def fits(self) -> bool:
        """Whether the job would run."""
        return self.step_s is not None

    @property
    def gpu_s(self) -> float:
        """Step time over all GPUs: what a step costs."""
        assert self.step_s is not None
        return self.step_s * self.gpus

    def told(self, command: Command) -> str:
        """The change as flags, with what it brings."""
        text = self.change.text
        if self.gpus != command.gpus:
            text = text.replace(f"{self.change.gpus} times the GPUs", f"{self.gpus} GPUs")
            text = text if "GPUs" in text else f"{text} on {self.gpus} GPUs"
        return f"{text} ({self.needed_gib:.1f} GiB, step {self.step_s:.3g} s)"


def memory_findings(command: Command, legal: Legal) -> list[Finding]:
    """What the prediction says of a command's memory.

    Args:
        command: a legal command with a platform.
        legal: whether a changed command is one that Megatron accepts.
    """
    assert command.platform
    try:
        found = memory(job_of(command.values, command.gpus), command.platform)
    except PiperError as error:
        return [_finding("memory.unknown", "info", f"memory is not judged: {error}", "")]
    worst = max(found.stages, key=lambda stage: stage.needed_gib)
    needed = worst.needed_gib
    where = f"stage {worst.stage}" if len(found.stages) > 1 else "every GPU"
    if found.fits:
        text = f"memory fits: {where} needs {needed:.1f} GiB of {found.capacity_gib:.1f} GiB"
        return [_finding("memory.fits", "info", text, "")]
    times = needed / found.capacity_gib
    start = f"{times:.1f} times the memory there is: " if times >= FAR_TOO_LARGE else ""
    message = (
        f"{start}memory does not fit: {where} needs {needed:.1f} GiB and a GPU of "
        f"{command.platform.name} has {found.capacity_gib:.1f} GiB; {_shares(worst)}"
    )
    return [_finding("memory.does-not-fit", "error", message, _fix(command, legal, worst))]


def _shares(stage: StageMemory) -> str:
    sizes = {text: getattr(stage, f"{name}_gib") for name, text in PARTS.items()}
    largest = sorted(sizes.items(), key=lambda part: part[1], reverse=True)[:SHOWN]
    return "most of it is " + ", ".join(f"{text} {gib:.1f} GiB" for text, gib in largest)


def _fix(command: Command, legal: Legal, worst: StageMemory) -> str:
    parts = []
    whole = _try(command, legal, full_recomputation())
    only_states = whole is None or not whole.fits
    if only_states:
        states = worst.weights_gib + worst.gradients_gib + worst.optimizer_gib
        parts.append(
            "no change of recomputation helps: weights, gradients and optimizer states alone are "
            f"{states:.1f} GiB"
        )
    fitting = _fitting(command, legal)
    here = [trial for trial in fitting if trial.gpus == command.gpus]
    if here:
        parts.append("cheapest first: " + " | ".join(t.told(command) for t in fitting[:SHOWN]))
    if only_states or not here:
        more = _more_gpus(command, legal)
        parts.append(f"or more GPUs: {more}" if here else f"more GPUs are needed: {more}")
    return "; ".join(parts)


def _fitting(command: Command, legal: Legal) -> list[Trial]:
    """Changes, and pairs of them where few do alone, with which the job fits, cheapest first."""
    trials = _tried(command, legal, changes(command))
    fitting = [trial for trial in trials if trial.fits]
    if len(fitting) < SHOWN:
        fitting += [trial for trial in _tried(command, legal, _pairs(trials)) if trial.fits]
    return sorted(fitting, key=lambda trial: trial.gpu_s)


def _tried(command: Command, legal: Legal, some: Iterable[Change]) -> list[Trial]:
    return [trial for change in some if (trial := _try(command, legal, change))]


def _try(command: Command, legal: Legal, change: Change) -> Trial | None:
    """What a change brings; None when Megatron would not run it."""
    assert command.platform
    values = argparse.Namespace(**vars(command.values) | change.values)
    gpus = command.gpus * change.gpus
    changed = replace(command, values=values, gpus=gpus, given=command.given | change.values.keys())
    if not legal(changed):
        return None
    try:
        job = job_of(values, gpus)
        found = memory(job, command.platform)
        step_s = step_time(job, command.platform).time.step_s if found.fits else None
    except PiperError:
        return None
    return Trial(change, max(stage.needed_gib for stage in found.stages), step_s, gpus)


def _pairs(trials: list[Trial]) -> list[Change]:
    """Pairs of changes of different kinds, of those that save most."""
    saving = sorted(trials, key=lambda trial: trial.needed_gib)[:PAIRED]
    return [
        first.change.and_also(second.change)
        for first, second in itertools.combinations(saving, 2)
        if first.change.kind != second.change.kind
    ]


def _more_gpus(command: Command, legal: Legal) -> str:
    """The smallest number of GPUs with which the job fits."""
    factor = 2
    while factor <= MOST_GPUS:
        some = [
            both
            for change in scaled(command, factor)
            for both in (change, change.and_also(full_recomputation()))
        ]
        fitting = [trial for trial in _tried(command, legal, some) if trial.fits]
        if fitting:
            best = min(fitting, key=lambda trial: trial.gpu_s)
            return f"{command.gpus * factor} are the minimum with these sizes: {best.told(command)}"
        factor += 1 if factor < 4 else factor // 2
    return f"even {command.gpus * MOST_GPUS} are too few with these sizes"


def _finding(id: str, severity: str, message: str, fix: str) -> Finding:
    return Finding.model_validate(
        {"id": id, "severity": severity, "message": message, "fix": fix, "source": SOURCE}
    )
