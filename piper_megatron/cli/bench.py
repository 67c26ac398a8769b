"""Measures this machine, in one process or under torchrun or srun on many, and writes its platform
file.

    piper-megatron bench --out my.yaml --quick
    torchrun --nproc-per-node 8 --nnodes 2 ... -m piper_megatron bench --out my.yaml
"""

import argparse
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

from piper_megatron.errors import PiperError

NAME = "bench"
HELP = "measure this machine and write its platform file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--out",
        metavar="FILE",
        required=True,
        help="platform file to write (*.yaml); finished points are kept beside it, so that a run "
        "that was stopped goes on where it was",
    )
    parser.add_argument("--quick", action="store_true", help="few points, within a minute")
    parser.add_argument(
        "--platform",
        metavar="NAME|FILE",
        help="platform of which everything stays that is not measured; default: the one that the "
        "job is recognised to be on, or else one with this device",
    )
    parser.add_argument("--name", help="of the platform; default: that of the file")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    out = Path(args.out)
    if out.suffix not in (".yaml", ".yml"):
        raise PiperError(f"--out takes a file *.yaml, got '{args.out}'")
    if not out.parent.is_dir():
        raise PiperError(f"--out {args.out}: there is no folder {out.parent}")
    name = args.name if args.name is not None else re.sub(r"[^a-z0-9_-]+", "-", out.stem.lower())
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise PiperError(
            f"a platform's name has small letters, digits, - and _, got '{name}'; give another "
            "--name"
        )
    if find_spec("torch") is None:
        raise PiperError(
            "a measurement needs torch; install it with: pip install 'piper-megatron[train]'"
        )
    from piper_megatron.bench.run import bench
    from piper_megatron.report.bench import render_profile
    from piper_megatron.report.progress import progress_bar
    from piper_megatron.runtime.launch import adopt_slurm

    if "RANK" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        adopt_slurm(os.environ)
    with progress_bar() as progress:
        profile = bench(out, quick=args.quick, source=args.platform, name=name, progress=progress)
    if profile is not None:
        width = max(shutil.get_terminal_size((100, 24)).columns, 80)
        print(render_profile(profile, str(out), width))
    return 0
