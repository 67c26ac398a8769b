"""The words of a command before Megatron's arguments: how many ranks start, and which script."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from piper_megatron.errors import WorkloadError

# option -> which of the sizes of `Ranks` it holds
_TORCHRUN = {
    "--nnodes": "nodes",
    "--nproc": "per_node",
    "--nproc-per-node": "per_node",
    "--nproc_per_node": "per_node",
}
_SLURM = {
    "-N": "nodes",
    "--nodes": "nodes",
    "-n": "tasks",
    "--ntasks": "tasks",
    "--ntasks-per-node": "tasks_per_node",
    "--gpus-per-node": "gpus_per_node",
    "--gres": "gpus_per_node",
}
_MPI = {
    "-n": "tasks",
    "-np": "tasks",
    "--np": "tasks",
    "-ppn": "tasks_per_node",
    "--ppn": "tasks_per_node",
}
_FLUX = {"-N": "nodes", "--nodes": "nodes", "-n": "tasks", "--ntasks": "tasks"}
_LAUNCHERS: dict[str, Mapping[str, str]] = {
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "piper-megatron": _TORCHRUN,
    "srun": _SLURM,
    "sbatch": _SLURM,
    "salloc": _SLURM,
    "mpirun": _MPI,
    "mpiexec": _MPI,
    "aprun": {"-n": "tasks", "-N": "tasks_per_node"},
    "flux": _FLUX,
}
SCRIPT_SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".batch")
_OTHER_MODELS = ("bert", "t5", "mamba", "hybrid", "vlm", "vision", "ict", "retro", "multimodal")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Numbers of a launcher's options or of a batch job.

    None is what nothing says, and 0 what is said by a word that is no number (`--nproc gpu`).

    Attributes:
        nodes: machines.
        tasks: processes over all machines.
        tasks_per_node, gpus_per_node: on each machine.
        per_node: workers that torchrun starts on each machine.
    """

    nodes: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    per_node: int | None = None

    @property
    def world(self) -> int | None:
        """Ranks of the job, as far as they are known."""
        if self.per_node is not None:
            return (1 if self.nodes is None else self.nodes) * self.per_node or None
        if self.tasks is not None:
            return self.tasks or None
        on_node = self.tasks_per_node or self.gpus_per_node
        return self.nodes * on_node if self.nodes and on_node else None


@dataclass(frozen=True)
class Launch:
    """A command, taken apart.

    Attributes:
        ranks: what the launchers' options say.
        script: the training script; None where none is named.
        start: index of the first word of Megatron's arguments.
    """

    ranks: Ranks
    script: str | None
    start: int


def launch_of(words: Sequence[str], known: Collection[str], ranks: Ranks | None = None) -> Launch:
    """Finds the script and the sizes of a command.

    Args:
        words: all of the command.
        known: Megatron's options; the first of them begins its arguments where no word is a script.
        ranks: sizes that the surrounding batch job says.

    Raises:
        WorkloadError: the script trains something that is no GPT.
    """
    ranks = ranks or Ranks()
    sizes: Mapping[str, str] = {}
    at_module = False
    for index, word in enumerate(words):
        if (at_module and word not in _LAUNCHERS) or word.endswith(".py"):
            _refuse_other_models(word)
            return Launch(ranks, word, index + 1)
        at_module = word in ("-m", "--module")
        if PurePath(word).name in _LAUNCHERS:
            sizes = _LAUNCHERS[PurePath(word).name]
        elif found := _size(words, index, sizes):
            ranks = _with(ranks, *found)
        elif word.partition("=")[0] in known:
            return Launch(ranks, None, index)
    return Launch(ranks, None, len(words))


def ranks_of_options(words: Sequence[str]) -> Ranks:
    """Sizes among the options of a batch job (`#SBATCH --nodes=8`)."""
    ranks = Ranks()
    for index in range(len(words)):
        if found := _size(words, index, _SLURM):
            ranks = _with(ranks, *found)
    return ranks


def _with(ranks: Ranks, name: str, number: int) -> Ranks:
    """A number beside those known; one without a value replaces none."""
    return replace(ranks, **{name: number}) if number or getattr(ranks, name) is None else ranks


def _size(words: Sequence[str], index: int, sizes: Mapping[str, str]) -> tuple[str, int] | None:
    """The size that a word, with the next one, holds: `--nodes=8`, `--nodes 8`, `-N 8` or `-N8`."""
    name, equals, value = words[index].partition("=")
    if not equals and name not in sizes and re.fullmatch(r"-[A-Za-z]\d+", name):
        name, value = name[:2], name[2:]
    elif not equals:
        value = words[index + 1] if index + 1 < len(words) else ""
    if name not in sizes:
        return None
    # --gres=gpu:8, --gpus-per-node=h100:8
    number = re.fullmatch(r"(?:[A-Za-z][\w.-]*:)*(\d+)", value)
    return sizes[name], int(number[1]) if number else 0


def _refuse_other_models(script: str) -> None:
    name = PurePath(script).stem.lower()
    if name.startswith("pretrain_") and name.removeprefix("pretrain_").startswith(_OTHER_MODELS):
        raise WorkloadError(
            f"{script} trains no GPT; the resource model knows those of pretrain_gpt.py only"
        )
