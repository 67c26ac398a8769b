"""A training command, read: the one input of the resource model."""

from dataclasses import dataclass

from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.pipeline import PipelineLayout
from piper_megatron.layout.sizes import Sizes
from piper_megatron.workload.spec import BatchSpec, ModelSpec, TrainingSpec


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, how, and on how many ranks.

    Attributes:
        model, batch, training: the workload.
        layout: parallel sizes.
        pipeline: what every stage holds.
    """

    model: ModelSpec
    batch: BatchSpec
    training: TrainingSpec
    layout: ParallelLayout
    pipeline: PipelineLayout

    @property
    def sizes(self) -> Sizes:
        """Sizes that the formulas of `resources/` take."""
        return Sizes(
            world=self.layout.world,
            tp=self.layout.tp,
            cp=self.layout.cp,
            pp=self.layout.pp,
            ep=self.layout.ep,
            etp=self.layout.etp,
            vpp=self.pipeline.vpp,
            micro_batch=self.batch.micro_batch,
            global_batch=self.batch.global_batch,
            seq=self.batch.seq,
        )
