"""A training command, read: the one input of the resource model."""

import argparse
from dataclasses import dataclass

from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.pipeline import PipelineLayout, pipeline_layout
from piper_megatron.layout.sizes import Sizes
from piper_megatron.workload.reading import batch_spec, effective, model_spec, training_spec
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


def job_of(values: argparse.Namespace, world: int) -> Job:
    """The job that Megatron's arguments describe.

    Args:
        values: as Megatron's parser or `read_arguments` returns them, or those of a running job.
        world: number of ranks.

    Raises:
        WorkloadError: the workload cannot be read or contradicts itself.
        LayoutError: the sizes cannot be combined, or the layers cannot be shared out.
    """
    values = effective(values, world)
    layout = ParallelLayout(
        world=world,
        tp=values.tensor_model_parallel_size,
        cp=values.context_parallel_size,
        pp=values.pipeline_model_parallel_size,
        ep=values.expert_model_parallel_size,
        etp=values.expert_tensor_parallel_size,
    )
    pipeline = pipeline_layout(
        values.num_layers,
        layout.pp,
        values.virtual_pipeline_model_parallel_size or 1,
        first=values.decoder_first_pipeline_num_layers,
        last=values.decoder_last_pipeline_num_layers,
        account_for_embedding=values.account_for_embedding_in_pipeline_split,
        account_for_loss=values.account_for_loss_in_pipeline_split,
        mtp_layers=values.mtp_num_layers or 0,
        text=values.pipeline_model_parallel_layout,
    )
    return Job(
        model=model_spec(values),
        batch=batch_spec(values),
        training=training_spec(values),
        layout=layout,
        pipeline=pipeline,
    )
