"""Corrects a platform's constants by the logs of trainings on it, and shows before and after.

What follows -- are the arguments of the run: once for all logs, or behind a further -- for each log
in their order. Logs that list their arguments, as rank 0's output does, need none.
"""

import argparse
import json
import shutil
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from piper_megatron.cli.job_options import (
    add_job_options,
    add_prediction_options,
    job_platform,
    megatron_arguments,
    ranks,
    read_imbalance,
)
from piper_megatron.errors import CalibrationError, PlatformError

if TYPE_CHECKING:
    from piper_megatron.platform.platform import Platform
    from piper_megatron.workload.arguments import Arguments

NAME = "calibrate"
HELP = "correct a platform's constants by the log of a training on it"
_NEXT = "--"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_job_options(parser)
    add_prediction_options(parser)
    parser.add_argument(
        "--log",
        metavar="FILE",
        action="append",
        required=True,
        help="output of a training on the platform; again for every further run, in another "
        "layout best",
    )
    parser.add_argument("--out", metavar="FILE", help="write the corrected platform there (*.yaml)")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    from datetime import date

    from piper_megatron.calibration.calibrate import calibrate
    from piper_megatron.calibration.log import read_log
    from piper_megatron.calibration.match import measured_run
    from piper_megatron.report.calibrate import calibration_json, render_calibration

    platform = job_platform(args)
    if platform is None:
        raise PlatformError("say on which machine they ran, for instance --platform dgx-h100")
    platform.need_accelerator().check_stack(args.stack)
    runs = []
    for path, given in zip(args.log, _given(args), strict=True):
        gpus = ranks(args.gpus, given.gpus if given else None)
        measured = measured_run(read_log(path), given, gpus)
        imbalance = read_imbalance(args.imbalance, measured.job.layout.ep)
        runs.append(replace(measured, imbalance=imbalance))
    found = calibrate(platform, runs, stack=args.stack, when=date.today().isoformat())
    if args.out is not None:
        _write(found.platform, args.out)
    if args.json:
        print(json.dumps(calibration_json(found, args.out)))
    else:
        width = max(shutil.get_terminal_size((100, 24)).columns, 80)
        print(render_calibration(found, args.out, width))
    return 0


def _given(args: argparse.Namespace) -> "list[Arguments | None]":
    """The arguments of each log's run; None where the log is to list them."""
    groups = [list(words) for split, words in groupby(args.arguments, _NEXT.__eq__) if not split]
    if not groups and args.model is None and args.hf is None:
        return [None] * len(args.log)
    if len(groups) > 1 and len(groups) != len(args.log):
        raise CalibrationError(
            f"{len(args.log)} logs and {len(groups)} commands, each behind a --; give one for "
            "all, one for each in the order of the logs, or none where the logs list theirs"
        )
    read: list[Arguments | None] = [
        megatron_arguments(argparse.Namespace(**vars(args) | {"arguments": group}))
        for group in groups or [[]]
    ]
    return read if len(read) == len(args.log) else read * len(args.log)


def _write(platform: "Platform", path: str) -> None:
    from piper_megatron.platform.writer import platform_yaml

    if not path.endswith((".yaml", ".yml")):
        raise CalibrationError(f"--out {path}: a platform file ends in .yaml")
    try:
        Path(path).write_text(platform_yaml(platform), encoding="utf-8")
    except OSError as error:
        raise CalibrationError(f"cannot write {path}: {error.strerror}") from None
