"""Memory by stage, time of a step by part and MFU of a training command, without running it."""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

from piper_megatron.cli.job_options import add_job_options, job_inputs
from piper_megatron.errors import PlatformError, WorkloadError

NAME = "estimate"
HELP = "predict memory, step time and MFU of a training command"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_job_options(parser)
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
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the pipeline and the memory of its stages (png, pdf)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    from piper_megatron.layout.job import job_of
    from piper_megatron.report.estimate import render_estimate
    from piper_megatron.resources.estimate import estimate

    arguments, platform, gpus = job_inputs(args)
    if platform is None:
        raise PlatformError("say on which machine it runs, for instance --platform dgx-h100")
    job = job_of(arguments.values, gpus)
    if args.model is not None:
        job = replace(job, model=job.model.model_copy(update={"name": args.model}))
    imbalance = _imbalance(args.imbalance, job.layout.ep)
    platform.need_accelerator().check_stack(args.stack)
    found = estimate(job, platform, stack=args.stack, imbalance=imbalance)
    if args.plot is not None:
        from piper_megatron.report.pipeline_figure import draw
        from piper_megatron.resources.step import step_time

        step = step_time(job, platform, args.stack, imbalance)
        title = f"{job.model.name} on {gpus:,} ranks of {platform.name}"
        draw(Path(args.plot), title, step.timeline, step.after_s, found.memory)
    if args.json:
        print(json.dumps(found.model_dump(mode="json")))
        return 0
    width = max(shutil.get_terminal_size((100, 24)).columns, 80)
    print(render_estimate(found, job, platform.name, width, arguments.unknown))
    return 0


def _imbalance(text: str, ep: int) -> float:
    from piper_megatron.resources.imbalance import imbalance_of_trace

    try:
        value = float(text)
    except ValueError:
        return imbalance_of_trace(Path(text), ep)
    if not 1 <= value < float("inf"):
        raise WorkloadError(f"--imbalance takes a number from 1.0 (balanced) on, got '{text}'")
    return value
