"""Memory by stage, time of a step by part and MFU of a training command, without running it."""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

from piper_megatron.cli.job_options import (
    add_job_options,
    add_prediction_options,
    job_inputs,
    read_imbalance,
)
from piper_megatron.errors import PlatformError

NAME = "estimate"
HELP = "predict memory, step time and MFU of a training command"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_job_options(parser)
    add_prediction_options(parser)
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
    imbalance = read_imbalance(args.imbalance, job.layout.ep)
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
