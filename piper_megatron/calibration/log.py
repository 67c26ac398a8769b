"""What a training log of Megatron says, line by line; nothing is judged here.

Written by megatron/training (0.17.1 to 0.19.2): `training_log` and `get_model` of training.py,
`report_memory` of utils, `validate_args` and `_print_args` of arguments.py. Launchers put a prefix
before a line (`[default3]:`, `12: `, a date), and lines of several ranks may run into each other,
so nothing is expected to start a line.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from piper_megatron.errors import CalibrationError

_MIB = 2**20
_GIB = 2**30
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ITERATION = re.compile(r"iteration\s+(\d+)\s*/\s*\d+\s*\|(.*)")
_ELAPSED = "elapsed time per iteration (ms)"
_HEADING = re.compile(r"-{8,} (end of )?arguments -{8,}")
_ARGUMENT = re.compile(r"(\w+) \.{2,} ?(.*)")
_WORLD = re.compile(r"using world size: (\d+)")
_SIZES = {
    name: re.compile(rf"{word}[- ]size: (\d+)")
    for name, word in (
        ("dp", "data-parallel"),
        ("cp", "[ ,]context-parallel"),
        ("tp", "tensor-model-parallel"),
        ("pp", "pipeline-model-parallel"),
    )
}
# the first number is the tensor rank, the last but one the pipeline rank
_PARAMETERS = re.compile(
    r"number of parameters on \([\w, ]+\)\s*model parallel rank \((\d+), (?:\d+, )?(\d+)\): (\d+)"
)
_MEMORY = re.compile(r"\[Rank (\d+)\] \(after (\d+) iterations\) memory \(MB\) \|(.*)")
_VOCABULARY = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")


@dataclass(frozen=True)
class Iteration:
    """A line of the training loop.

    Attributes:
        number: of the last iteration that the line is about.
        elapsed_s: of an iteration, the mean since the line before.
        global_batch: sequences of a step; None in lines without it.
        tflops: of a GPU, by Megatron's count; None without `--log-throughput`.
        skipped, nan: iterations since the line before in which nothing was learnt.
    """

    number: int
    elapsed_s: float
    global_batch: int | None = None
    tflops: float | None = None
    skipped: int = 0
    nan: int = 0


@dataclass(frozen=True)
class MemoryReport:
    """What torch's allocator held at most on one rank, GiB = 2^30 bytes.

    Attributes:
        iteration: after which it was reported.
        allocated_gib, reserved_gib: the largest so far.
    """

    iteration: int
    allocated_gib: float
    reserved_gib: float


@dataclass
class TrainLog:
    """A log; several starts of one training may follow each other in it.

    Attributes:
        name: by which a report calls it.
        sessions: iterations of each start.
        arguments: of each start that lists them, destination -> text.
        world: number of ranks.
        sizes: parallel sizes by axis (`dp`, `cp`, `tp`, `pp`).
        parameters: (tensor rank, pipeline rank) -> parameters there.
        memory: rank -> its last report.
        padded_vocab: rows of the embedding.
    """

    name: str
    sessions: list[list[Iteration]] = field(default_factory=list)
    arguments: list[dict[str, str]] = field(default_factory=list)
    world: int | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    parameters: dict[tuple[int, int], int] = field(default_factory=dict)
    memory: dict[int, MemoryReport] = field(default_factory=dict)
    padded_vocab: int | None = None


def read_log(path: str | Path) -> TrainLog:
    """Reads a log file.

    Raises:
        CalibrationError: it cannot be read.
    """
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as lines:
            return parse_log(lines, str(path))
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror}") from None


def parse_log(lines: Iterable[str], name: str) -> TrainLog:
    """Reads the lines of a log."""
    log = TrainLog(name)
    listing = False
    for raw in lines:
        line = _COLOURS.sub("", raw)
        if heading := _HEADING.search(line):
            listing = heading[1] is None
            if listing:
                log.arguments.append({})
                log.sessions.append([])
        elif listing and (argument := _ARGUMENT.search(line)):
            log.arguments[-1][argument[1]] = argument[2].strip()
        elif _ELAPSED in line:
            _read_iteration(log, line)
        else:
            _read_facts(log, line)
    log.sessions = [session for session in log.sessions if session]
    if log.arguments and (world := log.arguments[-1].get("world_size", "")).isdigit():
        log.world = int(world)
    return log


def _read_iteration(log: TrainLog, line: str) -> None:
    found = _ITERATION.search(line)
    if found is None:
        return
    pairs = (part.partition(":") for part in found[2].split("|"))
    said = {name.strip(): value for name, _, value in pairs}
    # some forks write the mean so far behind the time
    elapsed_ms = _number(said.get(_ELAPSED))
    if elapsed_ms is None:
        return
    batch = _number(said.get("global batch size"))
    iteration = Iteration(
        number=int(found[1]),
        elapsed_s=elapsed_ms / 1e3,
        global_batch=None if batch is None else int(batch),
        tflops=_number(said.get("throughput per GPU (TFLOP/s/GPU)")),
        skipped=int(_number(said.get("number of skipped iterations")) or 0),
        nan=int(_number(said.get("number of nan iterations")) or 0),
    )
    if not log.sessions or (log.sessions[-1] and iteration.number <= log.sessions[-1][-1].number):
        log.sessions.append([])
    log.sessions[-1].append(iteration)


def _read_facts(log: TrainLog, line: str) -> None:
    if memory := _MEMORY.search(line):
        _read_memory(log, memory)
    elif parameters := _PARAMETERS.search(line):
        log.parameters[int(parameters[1]), int(parameters[2])] = int(parameters[3])
    elif world := _WORLD.search(line):
        log.world = int(world[1])
        log.sizes = {axis: int(s[1]) for axis, size in _SIZES.items() if (s := size.search(line))}
    elif vocabulary := _VOCABULARY.search(line):
        log.padded_vocab = int(vocabulary[1])


def _read_memory(log: TrainLog, found: re.Match[str]) -> None:
    pairs = (part.partition(":") for part in found[3].split("|"))
    said = {name.strip(): _number(value) for name, _, value in pairs}
    allocated = said.get("max allocated")
    reserved = said.get("max reserved") or said.get("reserved")
    # zero where the backend keeps no statistics
    if allocated and reserved:
        log.memory[int(found[1])] = MemoryReport(
            int(found[2]), allocated * _MIB / _GIB, reserved * _MIB / _GIB
        )


def _number(text: str | None) -> float | None:
    found = re.search(_NUMBER, text or "")
    return float(found[0]) if found else None
