"""The `--piper-*` flags: what they are called, and the grid that one of them holds."""

import argparse
import re
from collections.abc import Callable

from piper_megatron.errors import LayoutError

# flag, metavar, help
PIPER_FLAGS = (
    (
        "--piper-grid",
        "PPxEP",
        "pipeline and expert parallel sizes, for instance 16x8; replaces "
        "--pipeline-model-parallel-size and --expert-model-parallel-size",
    ),
    (
        "--piper-topology",
        "auto|NAME|FILE",
        "where the nodes, switches and groups are: what the job can see, a platform of the "
        "library (piper-megatron topology --list), or a YAML file",
    ),
    (
        "--piper-placement",
        "auto|block|none|FILE",
        "which device plays which logical rank: by cost, node by node in topology order, the "
        "launcher's order, or as a file of 'piper-megatron topology --save' says; "
        "auto when a topology is given",
    ),
)


def parse_grid(flag: str, text: str) -> tuple[int, int]:
    """Pipeline and expert parallel sizes of a grid such as `16x8`, the value of a flag.

    Raises:
        LayoutError: the text is not PPxEP.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not match:
        raise LayoutError(f"{flag} takes PPxEP, two whole numbers such as 16x8; got '{text}'")
    return int(match[1]), int(match[2])


def apply_grid(values: argparse.Namespace, typed: Callable[[str], bool]) -> None:
    """Turns `--piper-grid` into Megatron's sizes.

    Args:
        values: arguments; both sizes are set where a grid was given.
        typed: whether an option stands on the command line.

    Raises:
        LayoutError: the grid is malformed or contradicts a size that was typed.
    """
    if values.piper_grid is None:
        return
    grid = parse_grid("--piper-grid", values.piper_grid)
    for axis, size in zip(("pipeline", "expert"), grid, strict=True):
        flag, dest = f"--{axis}-model-parallel-size", f"{axis}_model_parallel_size"
        if typed(flag) and getattr(values, dest) != size:
            raise LayoutError(
                f"--piper-grid {values.piper_grid} says {'PP' if axis == 'pipeline' else 'EP'} "
                f"{size} but {flag} says {getattr(values, dest)}; remove one of the two"
            )
        setattr(values, dest, size)
