"""The `--piper-*` flags: what they are called, and the grid that one of them holds."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass

from piper_megatron.errors import LayoutError


@dataclass(frozen=True)
class PiperFlag:
    """A `--piper-*` flag; its value is the text that was typed, None without it.

    Attributes:
        name: with its dashes.
        metavar: what it takes; None for a switch, whose value is True.
        help: for `--help`.
    """

    name: str
    metavar: str | None
    help: str

    @property
    def dest(self) -> str:
        """Where its value goes."""
        return self.name[2:].replace("-", "_")


PIPER_FLAGS = (
    PiperFlag(
        "--piper-grid",
        "PPxEP",
        "pipeline and expert parallel sizes, for instance 16x8; replaces "
        "--pipeline-model-parallel-size and --expert-model-parallel-size",
    ),
    PiperFlag(
        "--piper-topology",
        "auto|NAME|FILE",
        "where the nodes, switches and groups are: what the job can see, a platform of the "
        "library (piper-megatron topology --list), or a YAML file",
    ),
    PiperFlag(
        "--piper-placement",
        "auto|block|none|FILE",
        "which device plays which logical rank: by cost, node by node in topology order, the "
        "launcher's order, or as a file of 'piper-megatron topology --save' says; "
        "auto when a topology is given",
    ),
    PiperFlag(
        "--piper-dispatcher",
        "flat|2dh|halo|rail|rbd|auto",
        "how tokens travel to their experts, in place of the exchange of "
        "--moe-token-dispatcher-type alltoall: in one all-to-all (flat), node then rail (2dh), "
        "rails beside the node (halo), once to every node (rail, rbd), or by predicted time (auto)",
    ),
    PiperFlag(
        "--piper-dispatcher-chunks",
        "N",
        "parts in which halo and rail send to the other nodes, so that what arrived is spread "
        "over the node meanwhile; by size without it",
    ),
    PiperFlag(
        "--piper-node-size",
        "N",
        "takes every N consecutive members of an expert group for a node, for a rehearsal on one "
        "machine; the true nodes without it",
    ),
    PiperFlag(
        "--piper-dispatcher-stats",
        None,
        "logs rows, bytes and seconds of every hop of the dispatcher",
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
