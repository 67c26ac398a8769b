"""Batch sizes against data parallelism, and sequence lengths."""

import itertools

from piper_megatron.check.command import Command
from piper_megatron.check.near import next_multiple
from piper_megatron.check.rule import Problem, rule

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@rule("batch.divisible", "training/arguments.py:694", "core/num_microbatches_calculator.py:381")
def global_batch_is_whole_micro_batches(c: Command) -> Problem | None:
    """The global batch is a multiple of the micro-batch times DP."""
    if not c.dp or c.step_batch_size_schedule is not None:
        return None
    if not c.decrease_batch_size_if_needed:
        return _not_divisible(c, c.micro_batch_size, _global_batch(c, c.dp), c.dp * c.gtp)
    if not _evaluates_otherwise(c):
        return _not_divisible(c, c.micro_batch_size, _global_batch(c, c.dp), c.dp)
    return None


def _global_batch(c: Command, dp: int) -> int:
    return c.values.global_batch_size or c.micro_batch_size * dp


def _evaluates_otherwise(c: Command) -> bool:
    return c.eval_global_batch_size is not None or c.eval_micro_batch_size is not None


@rule("batch.evaluation", "training/arguments.py:694", since="0.18.2")
def evaluation_batch_is_whole_micro_batches(c: Command) -> Problem | None:
    """The evaluation batch is a multiple of its micro-batch times DP."""
    if not c.dp or not _evaluates_otherwise(c):
        return None
    micro = c.eval_micro_batch_size or c.micro_batch_size
    whole = c.eval_global_batch_size
    if whole is None:
        whole = _global_batch(c, c.dp)
    return _not_divisible(c, micro, whole, c.dp, "--eval-global-batch-size")


def _not_divisible(
    c: Command, micro: int, whole: int, replicas: int, flag: str = "--global-batch-size"
) -> Problem | None:
    step = micro * replicas
    if whole % step == 0:
        return None
    above = next_multiple(whole, step)
    legal = f"{above - step} or {above}" if above > step else f"{above}"
    return Problem(
        f"{flag} {whole} is not a multiple of the micro-batch {micro} x DP {replicas} = {step} "
        f"(DP = {c.gpus} GPUs / (TP {c.tp} x PP {c.pp} x CP {c.cp}))",
        f"{flag} {legal}",
    )


@rule(
    "batch.at-least-one",
    "core/num_microbatches_calculator.py:389",
    fix="raise --global-batch-size",
)
def a_step_has_a_micro_batch(c: Command) -> bool:
    """--global-batch-size {c.values.global_batch_size} is less than one micro-batch for each of \
    the {c.dp} data-parallel ranks."""
    return bool(
        c.dp
        and c.decrease_batch_size_if_needed
        and c.values.global_batch_size
        and c.values.global_batch_size < c.micro_batch_size * c.dp * c.gtp
    )


@rule(
    "batch.schedule-or-size",
    "training/arguments.py:681",
    since="0.18.2",
    fix="drop --global-batch-size",
)
def schedule_excludes_a_constant_batch(c: Command) -> bool:
    """--step-batch-size-schedule and --global-batch-size exclude each other."""
    return c.step_batch_size_schedule is not None and c.values.global_batch_size is not None


@rule(
    "batch.schedule-and-decrease",
    "core/num_microbatches_calculator.py:266",
    since="0.18.2",
    fix="drop --decrease-batch-size-if-needed",
)
def schedule_excludes_decreasing(c: Command) -> bool:
    """--step-batch-size-schedule and --decrease-batch-size-if-needed exclude each other."""
    return c.step_batch_size_schedule is not None and c.decrease_batch_size_if_needed


@rule(
    "batch.schedule",
    "core/num_microbatches_calculator.py:517",
    "core/num_microbatches_calculator.py:538",
    "core/num_microbatches_calculator.py:539",
    "core/num_microbatches_calculator.py:545",
    "core/num_microbatches_calculator.py:556",
    since="0.18.2",
)
def schedule_can_be_read(c: Command) -> Problem | None:
    """A schedule is THRESHOLD:BATCH pairs, from 0 upwards."""
    text = c.step_batch_size_schedule
    fault = text is not None and _schedule_fault(text, c.seq)
    if fault:
        return Problem(
            f"--step-batch-size-schedule '{text}' {fault}",
            "write it as '0:768 250B:1536': thresholds in tokens from 0 upwards, then batch sizes",
        )
    return None


def _schedule_fault(text: str, seq: int) -> str | None:
    steps = []
    for entry in text.replace(",", " ").split():
        threshold, colon, batch = entry.partition(":")
        if not colon:
            return f"has an entry without a colon, '{entry}'"
        try:
            steps.append((_number(threshold) // seq, _number(batch)))
        except ValueError:
            return f"has an entry that is not a pair of numbers, '{entry}'"
    steps.sort(key=lambda step: step[0])
    if not steps:
        return "is empty"
    if steps[0][0] != 0:
        return "does not start at 0"
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(steps)):
        return "has two entries at the same sample"
    if any(batch <= 0 for _, batch in steps):
        return "has a batch size below 1"
    return None


def _number(text: str) -> int:
    text = text.strip().upper()
    factor = SUFFIXES.get(text[-1:], 1)
    return int(float(text[:-1] if text[-1:] in SUFFIXES else text) * factor)


@rule("sequence.context", "training/arguments.py:1296")
def sequence_divides_over_context_ranks(c: Command) -> Problem | None:
    """Every context-parallel rank has two equal pieces of the sequence."""
    length = c.values.seq_length
    if length is None or c.cp == 1 or length % (2 * c.cp) == 0:
        return None
    above = next_multiple(length, 2 * c.cp)
    return Problem(
        f"--seq-length {length} is not a multiple of 2 x CP {c.cp} = {2 * c.cp}",
        f"--seq-length {above}, or another --context-parallel-size",
    )


@rule(
    "sequence.one-flag",
    "training/arguments.py:1307",
    fix="drop --encoder-seq-length",
)
def sequence_length_is_given_once(c: Command) -> bool:
    """--seq-length and --encoder-seq-length are both given."""
    return c.values.seq_length is not None and c.encoder_seq_length is not None


@rule(
    "sequence.positions",
    "training/arguments.py:1314",
    fix="--max-position-embeddings {c.seq}",
)
def positions_cover_the_sequence(c: Command) -> bool:
    """--max-position-embeddings {c.max_position_embeddings} is less than the sequence length \
    {c.seq}."""
    return c.max_position_embeddings < c.seq


@rule(
    "sequence.decoder-positions",
    "training/arguments.py:1318",
    fix="--max-position-embeddings {c.decoder_seq_length}",
)
def positions_cover_the_decoder_sequence(c: Command) -> bool:
    """--max-position-embeddings {c.max_position_embeddings} is less than --decoder-seq-length \
    {c.decoder_seq_length}."""
    return c.decoder_seq_length is not None and c.max_position_embeddings < c.decoder_seq_length
