"""Whether the layout that is predicted to be best is the one that was measured to be best."""

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from piper_megatron.validation.runs import Run
from piper_megatron.validation.stack_factors import TimedRun

# destinations of Megatron's arguments that a layout is made of; all else is equal in a group
LAYOUT = frozenset(
    {
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "context_parallel_size",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "micro_batch_size",
        "microbatch_group_size_per_vp_stage",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
        "pipeline_model_parallel_size",
        "recompute_granularity",
        "recompute_method",
        "recompute_modules",
        "recompute_num_layers",
        "sequence_parallel",
        "tensor_model_parallel_size",
    }
)


@dataclass(frozen=True)
class LayoutGroup:
    """Runs that differ in nothing but layout.

    Attributes:
        runs: of one batch, so that their step times compare.
    """

    runs: tuple[TimedRun, ...]

    @property
    def best_measured(self) -> TimedRun:
        """The quickest run."""
        return min(self.runs, key=lambda run: run.measured_s)

    @property
    def best_predicted(self) -> TimedRun:
        """The run predicted to be quickest."""
        return min(self.runs, key=lambda run: run.predicted_s)

    @property
    def loss(self) -> float:
        """How much slower the run predicted to be quickest is than the quickest."""
        return self.best_predicted.measured_s / self.best_measured.measured_s - 1


@dataclass(frozen=True)
class ReadRun:
    """A run with its arguments and its time."""

    run: Run
    values: argparse.Namespace
    timed: TimedRun

    @property
    def layout(self) -> str:
        """What may differ in a group."""
        return repr(sorted((n, v) for n, v in vars(self.values).items() if n in LAYOUT))

    @property
    def all_else(self) -> str:
        """What is equal in a group."""
        run = self.run
        fixed = sorted((n, v) for n, v in vars(self.values).items() if n not in LAYOUT)
        said = (run.family, run.platform, run.ranks, run.routing, run.stack_description)
        return repr((said, fixed))


def layout_groups(runs: Iterable[ReadRun]) -> list[LayoutGroup]:
    """Groups of at least two layouts of one and the same training."""
    groups: dict[str, list[ReadRun]] = defaultdict(list)
    for run in runs:
        groups[run.all_else].append(run)
    return [
        LayoutGroup(tuple(member.timed for member in members))
        for members in groups.values()
        if len({member.layout for member in members}) > 1
    ]
