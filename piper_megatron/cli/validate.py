"""Replays published measured runs and shows our error beside each."""

import argparse
import json
import shutil
from pathlib import Path

from piper_megatron.errors import PiperError

NAME = "validate"
HELP = "replay published measured runs and show how far off the predictions are"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="measured runs, one JSON object a line"
    )
    parser.add_argument("--platform", metavar="NAME", help="only the runs of this platform")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw predicted over measured")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    from piper_megatron.report.accuracy import accuracy_json, draw_accuracy, render_accuracy
    from piper_megatron.strict import nearest
    from piper_megatron.validation.replay import replay
    from piper_megatron.validation.runs import read_runs

    runs = read_runs(args.data)
    if args.platform is not None:
        platforms = sorted({run.platform for run in runs})
        if args.platform not in platforms:
            raise PiperError(
                f"--platform {args.platform}: no run of it; {nearest(args.platform, platforms)}"
            )
        runs = [run for run in runs if run.platform == args.platform]
    replayed = replay(runs)
    if args.plot is not None:
        draw_accuracy(replayed, args.plot)
    if args.json:
        print(json.dumps(accuracy_json(replayed)))
    else:
        print(render_accuracy(replayed, max(shutil.get_terminal_size((100, 24)).columns, 80)))
    return 0
