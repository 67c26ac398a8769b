"""Starts a training script under the plug-in: in this process, or in torchrun's workers.

As a module (`python -m piper_megatron.runtime.launch SCRIPT ARGS...`) it is what each worker runs.
"""

import argparse
import io
import logging
import os
import runpy
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from piper_megatron.errors import USAGE_ERROR, LaunchError
from piper_megatron.runtime.hooks import require_known_megatron
from piper_megatron.runtime.user_errors import (
    ERROR_FILE,
    one_line_errors,
    reported_error,
)
from piper_megatron.switches import switched_on

_TORCHRUN_LOGGERS = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
)


def run_script(script: str, argv: list[str]) -> None:
    """Registers the plug-in and runs an unmodified script as `__main__`.

    Args:
        script: path of the training script.
        argv: its arguments.

    Raises:
        LaunchError: no such script, or neither a GPU nor the CPU backend.
        HookError: Megatron is missing or unsupported.
    """
    from piper_megatron.runtime.register import register

    if not Path(script).is_file():
        raise LaunchError(f"no training script {script}; give the path of a Python file")
    require_known_megatron()
    _require_device(argv)
    _write_whole_lines()
    sys.argv = [script, *argv]
    sys.path.insert(0, str(Path(script).resolve().parent))
    register()
    runpy.run_path(script, run_name="__main__")


def torchrun_parser() -> argparse.ArgumentParser:
    """Torchrun's own options.

    Raises:
        LaunchError: torch is not installed.
    """
    try:
        from torch.distributed.run import get_args_parser
    except ImportError:
        raise LaunchError(
            "training needs torch and Megatron; install them with: "
            "pip install 'piper-megatron[train]'"
        ) from None
    return get_args_parser()


def launch_workers(options: argparse.Namespace) -> int:
    """Runs torchrun with our workers; a usage error of any number of workers is printed once.

    Args:
        options: torchrun's options; `training_script` and `training_script_args` are the user's.

    Returns:
        Exit code: 0, 2 after a usage error, else that of the first worker that failed.

    Raises:
        LaunchError: neither a GPU nor the CPU backend.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    _require_device(options.training_script_args)
    options.training_script_args = [options.training_script, *options.training_script_args]
    options.module, options.training_script = True, "piper_megatron.runtime.launch"
    for name in _TORCHRUN_LOGGERS:
        logging.getLogger(name).addFilter(lambda record: reported_error() is None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[ERROR_FILE] = str(Path(folder) / "error.json")
        try:
            run(options)
        except ChildFailedError as failure:
            if (error := reported_error()) is not None:
                print(f"piper-megatron: error: {error}", file=sys.stderr)
                return USAGE_ERROR
            print(failure, file=sys.stderr)
            return max(failure.get_first_failure()[1].exitcode, 1)
        finally:
            del os.environ[ERROR_FILE]
    return 0


def adopt_slurm(environ: MutableMapping[str, str]) -> None:
    """Gives a task that srun started the variables that torch expects.

    Raises:
        LaunchError: the Slurm variables are incomplete.
    """
    from ClusterShell.NodeSet import NodeSet

    try:
        environ.setdefault("RANK", environ["SLURM_PROCID"])
        environ.setdefault("WORLD_SIZE", environ["SLURM_NTASKS"])
        environ.setdefault("LOCAL_RANK", environ["SLURM_LOCALID"])
        environ.setdefault("MASTER_ADDR", NodeSet(environ["SLURM_STEP_NODELIST"])[0])
        # jobs that share a node get ports of their own
        environ.setdefault("MASTER_PORT", str(20000 + int(environ["SLURM_JOB_ID"]) % 10000))
    except KeyError as missing:
        raise LaunchError(
            f"SLURM_PROCID is set but not {missing.args[0]}; start the script with srun, or say "
            "--nproc N for torchrun"
        ) from None


def _write_whole_lines() -> None:
    """Keeps the ranks' lines apart: torchrun's `python -u` writes a line and its end separately."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def _require_device(argv: list[str]) -> None:
    """Training needs a GPU or the CPU backend; the script's `--help` needs neither."""
    import torch

    if switched_on("PIPER_CPU") or {"-h", "--help"} & set(argv):
        return
    if not torch.cuda.is_available():
        raise LaunchError(
            "torch sees no GPU here; add --cpu to rehearse the run on the CPU, or start it on a "
            "node with GPUs and a torch build for them"
        )


if __name__ == "__main__":
    with one_line_errors():
        run_script(sys.argv[1], sys.argv[2:])
