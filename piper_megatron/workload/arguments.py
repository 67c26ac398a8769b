"""Megatron's arguments from whatever a user has: a list, a command, or a shell script."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from piper_megatron.workload import flags
from piper_megatron.workload.command import PIPER_OPTIONS, read_command
from piper_megatron.workload.dispatcher_flags import apply_dispatcher
from piper_megatron.workload.piper_flags import apply_grid


@dataclass(frozen=True)
class Arguments:
    """A command's arguments.

    Attributes:
        values: as Megatron's own parser would return them, but words in place of enumerations.
        given: destinations that the command sets.
        unknown: tokens that this release of Megatron does not know; a script may add options.
        gpus: ranks that the command starts; None where it does not say.
    """

    values: argparse.Namespace
    given: frozenset[str]
    unknown: tuple[str, ...] = ()
    gpus: int | None = None


def read_arguments(tokens: Sequence[str], *, version: str = flags.NEWEST) -> Arguments:
    """Reads a command; nothing of it is executed.

    Args:
        tokens: Megatron's arguments; a whole command (`torchrun`, `srun`, `python`, ...); the path
            of a shell script, with arguments behind it that win over the script's; or the text of
            a script.
        version: of Megatron-Core, whose options are known.

    Raises:
        WorkloadError: the command cannot be read, or a value is not legal.
        LayoutError: `--piper-grid` is malformed or contradicts a size beside it.
    """
    command = read_command(tokens, version)
    values, given, unknown = flags.parse(command.arguments, version, PIPER_OPTIONS)

    def typed(flag: str) -> bool:
        return flag[2:].replace("-", "_") in given

    apply_grid(values, typed)
    apply_dispatcher(values, typed)
    return Arguments(values, given, unknown, command.gpus)
