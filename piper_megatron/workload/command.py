"""From a command or a shell script to Megatron's arguments in it; nothing is executed."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from piper_megatron.errors import WorkloadError
from piper_megatron.workload import flags
from piper_megatron.workload.launcher import SCRIPT_SUFFIXES, launch_of
from piper_megatron.workload.piper_flags import PIPER_FLAGS

if TYPE_CHECKING:
    from piper_megatron.workload.shell import Shell, Started

PIPER_OPTIONS = tuple(
    flags.Option(
        options=(flag.name,), dest=flag.dest, kind="store" if flag.metavar else "store_true"
    )
    for flag in PIPER_FLAGS
)
# options whose text changes what is trained; a text elsewhere may stay without a value
_TEXTS_THAT_COUNT = {
    "cp_comm_type",
    "experimental_attention_variant",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "offload_modules",
    "pipeline_model_parallel_layout",
    "piper_dispatcher",
    "piper_dispatcher_chunks",
    "piper_grid",
    "piper_node_size",
    "recompute_modules",
    "spec",
    "yaml_cfg",
}
_NUMBERS_THAT_DO_NOT_COUNT = re.compile(
    "seed|num_workers|train_(iters|samples)|(decoupled_|min_)?lr|lr_.*|.*_interval|eval_iters"
    "|exit_.*|weight_decay|clip_grad|adam_.*|init_method_std|.*_port|distributed_timeout.*"
)


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
        tokens: Megatron's arguments; a whole command; the path of a shell script, with arguments
            of Megatron behind it that win over the script's; or the text of a script.
        version: of Megatron-Core, whose options are known.

    Raises:
        WorkloadError: there are none, or a variable among them has no value in the script.
    """
    words = [*tokens[1:]] if tokens[:1] == ["--"] else [*tokens]
    if not words or (words[0].startswith("--") and len(words[0].split()) == 1):
        return Command(tuple(words))
    from piper_megatron.workload.shell import Shell

    shell = Shell()
    if len(words) > 1:
        shell.run_words(words)
    elif len(words[0].split()) > 1:
        shell.run_text(words[0], "the command")
    else:
        shell.run_file(Path(words[0]))
    known = flags.options(version) | {option.options[0]: option for option in PIPER_OPTIONS}
    command = _training_command(shell, known)
    added = _arguments_beside(words, known, command)
    return replace(command, arguments=(*command.arguments, *added))


def _arguments_beside(
    words: list[str], known: Mapping[str, flags.Option], command: Command
) -> list[str]:
    """Arguments behind the path of a script that the script does not pass on itself (`"$@"`)."""
    behind = words[1:]
    typed = {word.partition("=")[0] for word in behind if word.startswith("--")}
    if Path(words[0]).suffix not in SCRIPT_SUFFIXES or not typed or not typed <= known.keys():
        return []
    passed_on = any(
        command.arguments[at : at + len(behind)] == tuple(behind)
        for at in range(len(command.arguments))
    )
    return [] if passed_on or not behind[0].startswith("--") else behind


def _training_command(shell: "Shell", known: Mapping[str, flags.Option]) -> Command:
    """The one command of a script that starts a training."""
    found: dict[tuple[str, ...], list[tuple[Started, int | None]]] = {}
    for started in shell.started:
        launch = launch_of(started.words, known, started.ranks)
        arguments = started.words[launch.start :]
        if launch.script or any(word.partition("=")[0] in known for word in arguments):
            found.setdefault(arguments, []).append((started, launch.ranks.world))
    trainings = {a: f for a, f in found.items() if any(_names_a_model(word) for word in a)} or found
    if not trainings:
        raise WorkloadError("no command with Megatron arguments (--num-layers, ...) found")
    if len(trainings) > 1:
        places = " and ".join(starts[0][0].place for starts in trainings.values())
        raise WorkloadError(f"more than one training command, at {places}; give one of them")
    ((arguments, starts),) = trainings.items()
    worlds = {world for _, world in starts}
    return Command(
        tuple(_settled(shell, arguments, known)), worlds.pop() if len(worlds) == 1 else None
    )


def _names_a_model(word: str) -> bool:
    return word.partition("=")[0] in ("--num-layers", "--encoder-num-layers", "--hidden-size")


def _settled(
    shell: "Shell", arguments: Sequence[str], known: Mapping[str, flags.Option]
) -> Iterator[str]:
    """The words with all that matters in them known.

    A path may stay as the script writes it; a number that changes nothing is left out.
    """
    variables = shell.variables
    flag, texts = "", 0.0  # texts: words that may follow without a value
    words = iter(arguments)
    for word in words:
        name, joined, value = word.partition("=")
        if not word.startswith("--"):
            important = "" if texts > 0 else word
        elif name in known and _is_harmless_number(known[name]):
            value = value if joined else next(words, "")
            if not variables.unresolved(value):
                yield from (name, value)
            continue
        else:
            flag, texts = name, _harmless_texts(name, known)
            important = name if texts else word
        texts -= bool(joined) or not word.startswith("--")
        for part in variables.unresolved(important)[:1]:
            raise WorkloadError(
                f"{part.text} {f'behind {flag} ' if flag else ''}has no value: {part.why}; give "
                "it one, as in 'NAME=8 bash SCRIPT', or write the value into the command"
            )
        yield variables.shown(word)


def _harmless_texts(name: str, known: Mapping[str, flags.Option]) -> float:
    """How many words behind a flag may be any text; one behind a flag of the script's own."""
    option = known.get(name)
    if option is None:
        return 1
    if option.kind != "store" or option.type != "str" or option.choices is not None:
        return 0
    if option.dest in _TEXTS_THAT_COUNT:
        return 0
    if isinstance(option.nargs, int):
        return option.nargs
    return math.inf if option.nargs else 1


def _is_harmless_number(option: flags.Option) -> bool:
    return (
        option.kind == "store"
        and option.type in ("int", "float")
        and option.nargs is None
        and _NUMBERS_THAT_DO_NOT_COUNT.fullmatch(option.dest) is not None
    )
