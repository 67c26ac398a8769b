"""A log beside the arguments of its run: one job, or why they are not of one run."""

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from piper_megatron.calibration.log import TrainLog
from piper_megatron.calibration.printed import printed_values
from piper_megatron.calibration.timing import StepTiming, step_timing
from piper_megatron.errors import CalibrationError, PiperError
from piper_megatron.layout.job import Job, job_of
from piper_megatron.resources.flops import step_flops
from piper_megatron.resources.parameters import parameter_counts
from piper_megatron.resources.reach import Order
from piper_megatron.workload import flags
from piper_megatron.workload.arguments import Arguments
from piper_megatron.workload.command import PIPER_OPTIONS
from piper_megatron.workload.effective import effective

# named first where several differ: the others may follow from them
_FIRST = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "global_batch_size",
    "micro_batch_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_experts",
    "moe_router_topk",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
)
_VOCABULARY = ("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by", "pad_vocab_size",
               "tokenizer_type")  # fmt: skip
# Megatron fills these in from others
_COPIES = ("encoder_num_layers", "encoder_seq_length")
# a script may add parameters of its own; counts of operations differ between releases
_PARAMETERS_APART = 0.01
_OPERATIONS_APART = 0.25
_SHOWN = 3
_ROUNDED_TFLOPS = 2.0  # from here on the one decimal of a log says enough


@dataclass(frozen=True)
class MeasuredRun:
    """A run with its log.

    Attributes:
        log: what was read.
        job: that ran.
        order: of its ranks on the devices.
        timing: of a step.
        taken: settings that the given arguments leave open and the log does not, as typed.
        imbalance: rows on the most loaded expert rank over the mean.
    """

    log: TrainLog
    job: Job
    order: Order
    timing: StepTiming
    taken: tuple[str, ...] = ()
    imbalance: float = 1.0


@dataclass(frozen=True)
class _Difference:
    """A value that differs, and matters to what a run costs.

    Attributes:
        dest: where Megatron keeps it.
        logged, given: the two values.
        of_size: it belongs to model, batch or layout, and not to the settings.
    """

    dest: str
    logged: Any
    given: Any
    of_size: bool

    def typed(self, value: Any) -> str:
        """How a command has one of the values."""
        flag = flags.spelling_of(self.dest)
        if isinstance(value, bool):
            return flag if value != flag.startswith("--no-") else f"no {flag}"
        if value is None:
            return f"no {flag}"
        words = value if isinstance(value, list | tuple) else [value]
        return " ".join([flag, *map(str, words)])


def measured_run(log: TrainLog, given: Arguments | None, gpus: int | None) -> MeasuredRun:
    """The job that a log is of, and its step time.

    The arguments that the log lists are what ran, and decide. Those that are given must agree with
    them in every size, and in every setting that the command sets.

    Args:
        log: what was read.
        given: arguments of the run; None where the log lists them.
        gpus: number of ranks, where it was said.

    Raises:
        CalibrationError: log and arguments contradict each other, or one of them says too little.
        WorkloadError, LayoutError: the arguments are of no job that the resource model knows.
    """
    world = _world(log, given, gpus)
    values, taken = _values(log, given, world)
    job = job_of(values, world)
    _check_sizes(log, job)
    _check_parameters(log, job)
    timing = step_timing(log, job.batch.global_batch)
    if not log.arguments:
        _check_operations(log, job)
    return MeasuredRun(log, job, _order(values), timing, taken)


def _world(log: TrainLog, given: Arguments | None, gpus: int | None) -> int:
    said = gpus if gpus is not None else given.gpus if given else None
    if log.world is None:
        if said is None:
            raise CalibrationError(
                f"{log.name} does not say on how many ranks it ran; add --gpus, for instance "
                "--gpus 64"
            )
        return said
    if said not in (None, log.world):
        raise CalibrationError(
            f"{log.name} is of {log.world} ranks, the arguments are for {said}; give the arguments "
            "of that run"
        )
    return log.world


def _values(
    log: TrainLog, given: Arguments | None, world: int
) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Arguments that ran, and those of them that only the log tells."""
    if not log.arguments:
        if given is None:
            raise CalibrationError(
                f"{log.name} does not list Megatron's arguments (rank 0 prints them); give those "
                "of the run behind --"
            )
        return given.values, ()
    logged = [printed_values(texts) for texts in log.arguments]
    for values in logged:
        _fill_vocabulary(values, log, given)
    first, *others = logged
    for other in others:
        if differences := _differences(other, first, world):
            raise CalibrationError(
                f"{log.name} holds starts of different runs, the first with "
                f"{_shown(differences, 'given')} and a later one with "
                f"{_shown(differences, 'logged')}; give a log for each"
            )
    if given is None:
        return first, ()
    differences = _differences(first, given.values, world)
    refused = [each for each in differences if each.of_size or each.dest in given.given]
    if refused:
        raise CalibrationError(
            f"{log.name} is of a run with {_shown(refused, 'logged')}, the arguments say "
            f"{_shown(refused, 'given')}; give the arguments of that run, or none, since the log "
            "lists its own"
        )
    return first, tuple(each.typed(each.logged) for each in differences)


def _fill_vocabulary(values: argparse.Namespace, log: TrainLog, given: Arguments | None) -> None:
    """The arguments are listed before the tokenizer, and with it the vocabulary, is known."""
    if values.vocab_size is not None or values.padded_vocab_size is not None:
        return
    if given is not None:
        for dest in _VOCABULARY:
            setattr(values, dest, getattr(given.values, dest))
    else:
        values.padded_vocab_size = log.padded_vocab


def _differences(
    logged: argparse.Namespace, given: argparse.Namespace, world: int
) -> list[_Difference]:
    """Values that differ and change the job, the most telling first."""
    job = job_of(given, world)
    theirs, ours = (_filled_in(values, world) for values in (logged, given))
    found = []
    for dest in (*flags.defaults(), *(option.dest for option in PIPER_OPTIONS)):
        value = getattr(theirs, dest, None)
        if value == getattr(ours, dest, None):
            continue
        changed = copy.copy(ours)
        setattr(changed, dest, value)
        try:
            other = job_of(changed, world)
        except PiperError:
            other = None
        if other == job:
            continue
        settings_only = other is not None and other.training != job.training and (
            (other.model, other.batch, other.layout, other.pipeline)
            == (job.model, job.batch, job.layout, job.pipeline)
        )  # fmt: skip
        found.append(_Difference(dest, value, getattr(ours, dest, None), not settings_only))
    known = {dest: place for place, dest in enumerate(_FIRST)}
    return sorted(found, key=lambda each: (not each.of_size, known.get(each.dest, len(known))))


def _filled_in(values: argparse.Namespace, world: int) -> argparse.Namespace:
    filled = effective(values, world)
    for dest in _COPIES:
        setattr(filled, dest, None)
    return filled


def _shown(differences: list[_Difference], side: str) -> str:
    """The first of them as a command has them."""
    return ", ".join(each.typed(getattr(each, side)) for each in differences[:_SHOWN])


def _check_sizes(log: TrainLog, job: Job) -> None:
    for axis, size in log.sizes.items():
        if size != getattr(job.layout, axis):
            raise CalibrationError(
                f"{log.name} is of a run with {axis.upper()} {size}, the arguments give "
                f"{axis.upper()} {getattr(job.layout, axis)}; give the arguments of that run"
            )


def _check_parameters(log: TrainLog, job: Job) -> None:
    ours = [int(sum(chunk.total for chunk in stage)) for stage in parameter_counts(job)]
    for (_, stage), count in log.parameters.items():
        if stage >= len(ours) or abs(count / ours[stage] - 1) > _PARAMETERS_APART:
            expected = f"{ours[stage]:,}" if stage < len(ours) else "no such stage"
            raise CalibrationError(
                f"{log.name} counts {count:,} parameters on a rank of pipeline stage {stage}, the "
                f"arguments give {expected}; give the arguments of that run"
            )


def _check_operations(log: TrainLog, job: Job) -> None:
    """Logged throughput tells the model's size, where no list of arguments does."""
    ours = step_flops(job) / job.layout.world / 1e12
    for tflops, theirs in _logged_operations(log, job):
        if not 1 / (1 + _OPERATIONS_APART) < theirs / ours < 1 + _OPERATIONS_APART:
            raise CalibrationError(
                f"{log.name} logs {tflops:.1f} TFLOP/s/GPU, which is {theirs:.3g} TFLOP a GPU and "
                f"step; the arguments give {ours:.3g}; give the arguments of that run"
            )
        return


def _logged_operations(log: TrainLog, job: Job) -> Iterator[tuple[float, float]]:
    """(TFLOP/s, TFLOP of a step) of lines with enough digits."""
    for session in log.sessions:
        for line in session:
            whole = line.global_batch in (None, job.batch.global_batch)
            if line.tflops and line.tflops >= _ROUNDED_TFLOPS and whole:
                yield line.tflops, line.tflops * line.elapsed_s


def _order(values: argparse.Namespace) -> Order:
    placement = getattr(values, "piper_placement", None)
    topology = getattr(values, "piper_topology", None)
    return "piper" if placement == "auto" or (topology and placement is None) else "megatron"
