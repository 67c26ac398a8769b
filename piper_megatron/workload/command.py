"""From a command or a shell script to Megatron's arguments in it; nothing is executed."""

from collections.abc import Sequence
from dataclasses import dataclass

from piper_megatron.workload import flags
from piper_megatron.workload.launcher import launch_of


@dataclass(frozen=True)
class Command:
    """A training command.

    Attributes:
        arguments: the words behind the script.
        gpus: ranks that it starts; None where it does not say.
    """

    arguments: tuple[str, ...]
    gpus: int | None = None


def read_command(tokens: Sequence[str], version: str = flags.NEWEST) -> Command:
    """Finds Megatron's arguments.

    Args:
        tokens: Megatron's arguments, a whole command, or one path or text of a shell script.
        version: of Megatron-Core, whose options are known.

    Raises:
        WorkloadError: there are none, or a variable among them has no value in the script.
    """
    words = [*tokens[1:]] if tokens[:1] == ["--"] else [*tokens]
    if not words or words[0].startswith("--"):
        return Command(tuple(words))
    launch = launch_of(words, flags.options(version))
    return Command(tuple(words[launch.start :]), launch.ranks.world)
