"""What is to be tuned: a command with holes, a machine, and what must not change."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from piper_megatron.check.command import Command
from piper_megatron.errors import LayoutError, WorkloadError
from piper_megatron.layout.pipeline import balanced_layout_string
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.reach import Order
from piper_megatron.workload import flags
from piper_megatron.workload.arguments import Arguments
from piper_megatron.workload.command import PIPER_OPTIONS
from piper_megatron.workload.dispatcher_flags import apply_dispatcher
from piper_megatron.workload.flags import spelling_of
from piper_megatron.workload.reading import effective, model_spec, training_spec
from piper_megatron.workload.spec import ModelSpec, TrainingSpec

# axis of a layout -> destination of Megatron's argument
AXES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "micro_batch": "micro_batch_size",
}
VIRTUAL = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
SPLIT = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
PLACEMENT = ("piper_placement", "piper_topology")
# the evaluation knows by itself where these do nothing
_WHERE_IT_MATTERS = {"sequence_parallel": True}


@dataclass(frozen=True)
class Choice:
    """One way to set some arguments.

    Attributes:
        name: for tables.
        tokens: as typed.
        rare: seldom better than the others, and tried for the best layouts alone.
    """

    name: str
    tokens: tuple[str, ...] = ()
    rare: bool = False

    @cached_property
    def values(self) -> dict[str, Any]:
        """Destination -> value."""
        return values_of(self.tokens)


def tokens_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Values as they are typed; the inverse of `values_of` for sizes, texts and switches."""
    tokens: list[str] = []
    for dest, value in values.items():
        tokens += [spelling_of(dest)] if value is True else [spelling_of(dest), str(value)]
    return tuple(tokens)


def values_of(tokens: Sequence[str]) -> dict[str, Any]:
    """What tokens of Megatron's and our own options set."""
    values, given, unknown = flags.parse(tokens, more=PIPER_OPTIONS)
    assert not unknown, unknown
    return {dest: getattr(values, dest) for dest in given}


@dataclass(frozen=True)
class Task:
    """A tuning task.

    Attributes:
        arguments: what the user gave, model and batch among it.
        gpus: ranks.
        platform: where.
        stack: name or description of the software; None for the platform's default.
        imbalance: rows of the most loaded expert rank over the mean.
    """

    arguments: Arguments
    gpus: int
    platform: Platform
    stack: str | None = None
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        values = self.arguments.values
        if values.step_batch_size_schedule is not None or values.rampup_batch_size:
            raise WorkloadError(
                "a batch size that changes during the run is not tuned; give --global-batch-size"
            )
        if values.global_batch_size is None:
            raise WorkloadError("--global-batch-size is missing; it is part of the task, add it")
        if values.tensor_parallel_num_weight_shards or (
            values.expert_tensor_parallel_num_weight_shards
        ):
            raise WorkloadError("weight shards beyond TP are not tuned; remove them")

    @cached_property
    def given(self) -> frozenset[str]:
        """Destinations that the user set, by any of their flags."""
        given = self.arguments.given
        if "piper_grid" in given:
            given |= {AXES["pp"], AXES["ep"]}
        return given

    def fixed(self, dests: Iterable[str]) -> bool:
        """Whether the user set one of these."""
        return not self.given.isdisjoint(dests)

    @cached_property
    def base(self) -> argparse.Namespace:
        """The user's arguments, with the smallest sizes where there are none."""
        values = argparse.Namespace(**vars(self.arguments.values))
        if AXES["micro_batch"] not in self.given:
            values.micro_batch_size = 1
        return values

    def changed(self, changes: Mapping[str, Any]) -> argparse.Namespace:
        """The user's arguments and these, as the command's parser would return them together."""
        values = argparse.Namespace(**{**vars(self.base), **changes})
        typed = self.given | changes.keys()
        apply_dispatcher(values, lambda flag: flag[2:].replace("-", "_") in typed)
        return values

    @property
    def orders(self) -> tuple[Order, ...]:
        """Orders of the ranks on the devices that can be had.

        Piper's placement does something where there is a level between the node and the whole
        machine.
        """
        deep = len(self.platform.levels) > self.platform.node_level + 2
        asked = self.arguments.values.piper_placement or "auto"
        return ("megatron", "piper") if deep and asked == "auto" else ("megatron",)

    def size_values(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """What a layout sets of that which the user has left open: destination -> value.

        Args:
            sizes: axis -> size, of all axes or of some; PP and VPP belong together.
        """
        dense = self.model.experts is None
        values: dict[str, Any] = {
            AXES[axis]: size
            for axis, size in sizes.items()
            if axis in AXES and AXES[axis] not in self.given
            if not (dense and axis in ("ep", "etp"))
        }
        if sizes.get("tp", 1) > 1 and not self.base.sequence_parallel:
            values["sequence_parallel"] = True
        if {"pp", "vpp"} <= sizes.keys():
            values |= self.split_values(sizes["pp"], sizes["vpp"]) or {}
        return values

    def split_values(self, pp: int, vpp: int) -> dict[str, Any] | None:
        """What shares out the layers, as evenly as can be; None where nothing does.

        The user's own split stays. Elsewhere Megatron's is taken where it comes out, and a layout
        text where it does not.
        """
        virtual = {VIRTUAL[0]: vpp} if vpp > 1 and not self.fixed(VIRTUAL) else {}
        if SPLIT[0] in self.given:
            return {}
        if self.fixed(SPLIT) or self.model.layers % (pp * vpp) == 0:
            return virtual
        if self.fixed(VIRTUAL):  # a layout text excludes them
            return None
        try:
            text = balanced_layout_string(self.model.layers, pp, vpp, self.model.mtp_layers)
        except LayoutError:
            return None
        return {SPLIT[0]: text}

    def command(self, changes: Mapping[str, Any]) -> Command:
        """What rules look at."""
        given = self.given | changes.keys()
        return Command(self.changed(changes), given, self.gpus, (), self.platform)

    def _one_rank(self, changes: Mapping[str, Any]) -> argparse.Namespace:
        """Effective values without parallelism, for what does not depend on it."""
        small = {dest: 1 for axis, dest in AXES.items() if axis != "micro_batch"}
        split = dict.fromkeys((*VIRTUAL, *SPLIT[:3])) | dict.fromkeys(SPLIT[3:], False)
        return effective(self.changed({**changes, **small, **split}), self.gpus)

    @cached_property
    def model(self) -> ModelSpec:
        """What is trained."""
        return model_spec(self._one_rank({}))

    def training(self, *choices: Choice) -> TrainingSpec:
        """Settings for the vectorised evaluation under some choices."""
        if choices not in self._trainings:
            self._trainings[choices] = self._training(choices)
        return self._trainings[choices]

    @cached_property
    def _trainings(self) -> dict[tuple[Choice, ...], TrainingSpec]:
        return {}

    def _training(self, choices: tuple[Choice, ...]) -> TrainingSpec:
        changes = {dest: value for choice in choices for dest, value in choice.values.items()}
        given_group = self.arguments.values.microbatch_group_size_per_vp_stage
        return training_spec(self._one_rank(changes)).model_copy(
            update={
                **_WHERE_IT_MATTERS,
                "overlap_p2p_comm": self.arguments.values.overlap_p2p_comm,
                "microbatch_group_size_per_vp_stage": given_group,
            }
        )

    def without(self, dests: Iterable[str]) -> "Task":
        """The same task with some of the user's arguments left to us."""
        dests = frozenset(dests)
        values = argparse.Namespace(**vars(self.arguments.values))
        empty = flags.defaults() | {option.dest: option.default for option in PIPER_OPTIONS}
        for dest in dests:
            setattr(values, dest, empty[dest])
        hidden = {"piper_grid"} if dests & {AXES["pp"], AXES["ep"]} else set()
        given = self.arguments.given - dests - hidden
        return replace(self, arguments=replace(self.arguments, values=values, given=given))
