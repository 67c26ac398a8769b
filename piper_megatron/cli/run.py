"""`piper-megatron run`: a training script under the plug-in, on GPUs or rehearsed on the CPU."""

import argparse
import os
import re

from piper_megatron.errors import LaunchError

NAME = "run"
HELP = "run a Megatron training script with the plug-in attached"

USAGE = """piper-megatron run [--cpu] [--nproc N] [torchrun options] SCRIPT [ARGS...]

Runs an unmodified Megatron training script; its arguments may hold --piper-* flags.

  --cpu       rehearse on CPU tensors over gloo (the same as PIPER_CPU=1)
  --nproc N   start N workers on this machine with torchrun (its --nproc-per-node)

Without torchrun options, a rank that srun or torchrun already numbered (SLURM_PROCID, or RANK and
WORLD_SIZE) runs the script in this very process. PIPER_DISABLE=1 leaves Megatron untouched;
PIPER_DEBUG=1 shows the traceback of an error.

torchrun options (all that torchrun knows, before SCRIPT):"""


def run_raw(argv: list[str]) -> int:
    """Runs the command.

    Args:
        argv: what follows `run` on the command line.

    Returns:
        The exit code.
    """
    if argv[:1] in (["-h"], ["--help"]):
        return _print_help()
    options = _parse(argv)
    if options.cpu:
        os.environ["PIPER_CPU"] = "1"
    from piper_megatron.runtime.launch import adopt_slurm, launch_workers, run_script
    from piper_megatron.runtime.user_errors import one_line_errors

    if _gives_torchrun_options(argv, options.training_script):
        return launch_workers(_for_torchrun(options))
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        adopt_slurm(os.environ)
    if "RANK" not in os.environ:
        options.nproc = "1" if options.cpu else "gpu"
        return launch_workers(_for_torchrun(options))
    if "WORLD_SIZE" not in os.environ:
        raise LaunchError("RANK is set but not WORLD_SIZE; set both, or say --nproc N")
    with one_line_errors():
        run_script(options.training_script, options.training_script_args)
    return 0


def _parser() -> argparse.ArgumentParser:
    from piper_megatron.runtime.launch import torchrun_parser

    parser = torchrun_parser()
    parser.prog = "piper-megatron run"
    # told in USAGE
    parser.add_argument("--cpu", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--nproc", help=argparse.SUPPRESS)
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    parser.usage = "piper-megatron run [--cpu] [--nproc N] [torchrun options] SCRIPT [ARGS...]"
    return parser.parse_args(argv)


def _gives_torchrun_options(argv: list[str], script: str) -> bool:
    return any(token != "--cpu" for token in argv[: argv.index(script)])


def _for_torchrun(options: argparse.Namespace) -> argparse.Namespace:
    """One machine needs no rendezvous address: torchrun's `--standalone`, over loopback."""
    if options.nproc is not None:
        if not re.fullmatch(r"[1-9]\d*|auto|gpu|cpu|xpu", options.nproc):
            raise LaunchError(f"--nproc takes a number of workers, or gpu; got '{options.nproc}'")
        options.nproc_per_node = options.nproc
    if options.nnodes == "1:1" and not options.rdzv_endpoint:
        options.standalone = True
        options.local_addr = options.local_addr or "localhost"
        if options.cpu:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return options


def _print_help() -> int:
    print(USAGE)
    help_text = _parser().format_help()
    print(help_text[help_text.index("options:") + len("options:") :].strip("\n"))
    return 0
