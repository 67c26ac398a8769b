"""Searches the parallel layouts and settings of a training command and proposes the best plans."""

import argparse
import json
import shutil
import sys
from pathlib import Path

from piper_megatron.cli.job_options import add_job_options, job_inputs
from piper_megatron.errors import PiperError, PlatformError

NAME = "tune"
HELP = "find the parallel layout and settings that train fastest on a machine"
# processes that search at the same time
_PROCESSES = 2
_OBJECTIVES = ("time", "memory", "gpus")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_job_options(parser)
    parser.add_argument("--top", metavar="K", default="5", help="plans to show (default 5)")
    parser.add_argument(
        "--objective",
        choices=_OBJECTIVES,
        default="time",
        help="the quickest plan (default), the one with the smallest memory, or the fewest of the "
        "GPUs with which it fits",
    )
    parser.add_argument(
        "--memory-margin",
        metavar="X",
        help="share of a GPU's memory that stays free, 0 to 0.9; default: what the platform's "
        "allocator reserves beyond what is used",
    )
    parser.add_argument(
        "--stack", metavar="NAME", help="software stack of the platform, by name or description"
    )
    parser.add_argument(
        "--imbalance",
        metavar="X",
        default="1.0",
        help="rows of the most loaded expert rank over the mean, 1.0 is balanced (default)",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw speed against memory of the best candidates (png, pdf)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code: 1 when nothing fits."""
    from piper_megatron.report.progress import progress_bar
    from piper_megatron.report.tune import draw_front, outcome_json, render_outcome
    from piper_megatron.tuning.limit import default_margin
    from piper_megatron.tuning.search import search
    from piper_megatron.tuning.task import Task

    arguments, platform, gpus = job_inputs(args)
    if platform is None:
        raise PlatformError("say for which machine, for instance --platform dgx-h100")
    accelerator = platform.need_accelerator()
    accelerator.check_stack(args.stack)
    margin = default_margin(platform)
    if args.memory_margin is not None:
        margin = _number("--memory-margin", args.memory_margin, 0.0, 0.9)
    task = Task(
        arguments,
        gpus,
        platform,
        args.stack,
        _number("--imbalance", args.imbalance, 1.0, 1e6),
    )
    name = args.model or (Path(args.hf).stem if args.hf else "this command's model")
    top = int(_number("--top", args.top, 1, 100))
    with progress_bar() as progress:
        outcome = search(
            task,
            objective=args.objective,
            margin=margin,
            top=top,
            processes=_PROCESSES,
            name=name,
            progress=progress,
        )
    if args.plot is not None:
        draw_front(Path(args.plot), outcome, f"{name} on {gpus:,} ranks of {platform.name}")
    if args.json:
        print(json.dumps(outcome_json(outcome)))
    else:
        width = max(shutil.get_terminal_size((100, 24)).columns, 80)
        capacity = accelerator.memory.capacity_gib
        print(render_outcome(outcome, name, platform.name, capacity, width))
    sys.stdout.flush()
    return 0 if outcome.plans else 1


def _number(flag: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise PiperError(f"{flag} takes a number from {least:g} to {most:g}, got '{text}'")
    return value
