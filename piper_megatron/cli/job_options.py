"""The options that say what is trained and where, for every command that predicts a job."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from piper_megatron.errors import WorkloadError

if TYPE_CHECKING:
    from piper_megatron.platform.platform import Platform
    from piper_megatron.workload.arguments import Arguments


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Declares the options; what follows `--` is Megatron's."""
    job = parser.add_argument_group("job")
    job.add_argument(
        "--platform",
        metavar="NAME|FILE",
        help="a platform of the library (piper-megatron topology --list) or a platform file",
    )
    job.add_argument("--gpus", metavar="N", help="ranks; default: what the command itself starts")
    model = job.add_mutually_exclusive_group()
    model.add_argument(
        "--hf", metavar="FILE", help="the model as config.json of Hugging Face, or its folder"
    )
    model.add_argument("--model", metavar="PRESET", help="a well-known model by its name")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="-- ARGUMENT",
        help="Megatron's arguments, a whole command, or a shell script; they win over --hf and "
        "--model",
    )


def add_prediction_options(parser: argparse.ArgumentParser) -> None:
    """Declares what a predicted time depends on beside the job."""
    parser.add_argument(
        "--stack", metavar="NAME", help="software stack of the platform, by name or description"
    )
    parser.add_argument(
        "--imbalance",
        metavar="X|FILE",
        default="1.0",
        help="rows of the most loaded expert rank over the mean, 1.0 is balanced (default); or a "
        "routing trace: one JSON array a line, rows by expert of one layer",
    )


def job_inputs(args: argparse.Namespace) -> "tuple[Arguments, Platform | None, int]":
    """What the options say: Megatron's arguments, the platform if one is given, and the ranks.

    Raises:
        PiperError: a file cannot be read, a name is unknown, or something is missing.
    """
    platform = job_platform(args)
    arguments, gpus = job_arguments(args)
    return arguments, platform, gpus


def job_platform(args: argparse.Namespace) -> "Platform | None":
    """The platform, if one is given.

    Raises:
        PiperError: it is unknown or its file is malformed.
    """
    from piper_megatron.platform.platform import load_platform

    return load_platform(args.platform) if args.platform is not None else None


def job_arguments(args: argparse.Namespace) -> "tuple[Arguments, int]":
    """Megatron's arguments and the number of ranks.

    Raises:
        WorkloadError: the command or the model cannot be read, or the ranks are not said.
        LayoutError: `--piper-grid` is malformed or contradicts another size.
    """
    arguments = megatron_arguments(args)
    gpus = ranks(args.gpus, arguments.gpus)
    if gpus is None:
        raise WorkloadError("say on how many ranks it runs, for instance --gpus 64")
    return arguments, gpus


def megatron_arguments(args: argparse.Namespace) -> "Arguments":
    """Megatron's arguments, without the number of ranks.

    Raises:
        WorkloadError: the command or the model cannot be read.
        LayoutError: `--piper-grid` is malformed or contradicts another size.
    """
    from dataclasses import replace

    from piper_megatron.workload import huggingface
    from piper_megatron.workload.arguments import read_arguments
    from piper_megatron.workload.command import read_command
    from piper_megatron.workload.presets import preset_arguments

    if args.hf is not None:
        model = huggingface.megatron_arguments(args.hf)
    elif args.model is not None:
        model = preset_arguments(args.model)
    elif args.arguments:
        return read_arguments(args.arguments)
    else:
        raise WorkloadError(
            "nothing to look at: give Megatron's arguments behind --, or a model with --model or "
            "--hf"
        )
    command = read_command(args.arguments)
    return replace(read_arguments([*model, *command.arguments]), gpus=command.gpus)


def ranks(typed: str | None, started: int | None) -> int | None:
    """Ranks of a job; None where nobody says.

    Args:
        typed: value of `--gpus`.
        started: that the command starts.

    Raises:
        WorkloadError: they contradict each other.
    """
    if typed is None:
        return started
    if not typed.isdigit() or int(typed) < 1:
        raise WorkloadError(f"--gpus takes a whole number from 1 on, got '{typed}'")
    if started is not None and started != int(typed):
        raise WorkloadError(
            f"--gpus says {typed} ranks and the command starts {started}; remove one of the two"
        )
    return int(typed)


def read_imbalance(text: str, ep: int) -> float:
    """The value of `--imbalance`: a number, or the file of a routing trace.

    Args:
        text: as typed.
        ep: expert parallel size, by which a trace's experts are shared out.

    Raises:
        WorkloadError: it is below 1, or the trace cannot be read.
    """
    from piper_megatron.resources.imbalance import imbalance_of_trace

    try:
        value = float(text)
    except ValueError:
        return imbalance_of_trace(Path(text), ep)
    if not 1 <= value < float("inf"):
        raise WorkloadError(f"--imbalance takes a number from 1.0 (balanced) on, got '{text}'")
    return value
