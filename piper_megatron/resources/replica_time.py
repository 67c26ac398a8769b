"""What happens once a step: gradients are reduced, parameters updated and gathered again.

Megatron-Core 0.19.2: distributed/distributed_data_parallel.py, pipeline_parallel/schedules.py
(`grad_sync_func`, `param_sync_func`), distributed/finalize_model_grads.py,
optimizer/distrib_optimizer.py.
"""

import itertools
from functools import cached_property

from piper_megatron.layout.job import Job
from piper_megatron.resources.communication import Exchange, step_communication
from piper_megatron.resources.compute import optimizer_seconds
from piper_megatron.resources.layer_time import Machine
from piper_megatron.resources.parameters import ParameterCount, parameter_counts
from piper_megatron.resources.schedule import Timeline
from piper_megatron.resources.state_costs import is_sharded

_GRADIENTS = ("gradients", "expert_gradients")
_PARAMETERS = ("parameters", "expert_parameters")


class ReplicaTime:
    """Seconds of what happens once a step on every stage."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job, self.machine = job, machine
        self._counts = parameter_counts(job)
        known: dict[ParameterCount, dict[str, Exchange]] = {}
        self._exchanges: list[list[dict[str, Exchange]]] = []
        for stage in self._counts:
            for count in stage:
                if count not in known:
                    known[count] = self._chunk_exchanges(count)
            self._exchanges.append([known[count] for count in stage])

    def _chunk_exchanges(self, count: ParameterCount) -> dict[str, Exchange]:
        return step_communication(
            self.job.model,
            self.job.training,
            self.job.sizes,
            self.machine.platform,
            dense_elements=count.dense,
            expert_elements=count.expert,
            order=self.machine.order,
        )

    @cached_property
    def gathered_before_s(self) -> list[list[float]] | None:
        """[PP][VPP] when a chunk's parameters are there, from the step's start; None if at once."""
        if not self.job.training.overlap_param_gather or self.job.training.fsdp:
            return None
        # chunks are gathered one after the other
        return [
            list(itertools.accumulate(_forward_s(chunk, _PARAMETERS) for chunk in stage))
            for stage in self._exchanges
        ]

    @cached_property
    def gathered_after_s(self) -> float:
        """Gather behind the optimizer, on the stage that needs longest."""
        if self.gathered_before_s is not None:
            return 0.0
        return max(
            sum(_exposed_s(chunk, "forward", _PARAMETERS) for chunk in stage)
            for stage in self._exchanges
        )

    def every_pass_s(self, stage: int, chunk: int, phase: str, pass_s: float) -> float:
        """What sharding parameters or gradients (FSDP) adds to each pass of a chunk."""
        hideable = sum(
            float(getattr(each, phase).hideable_s)
            for part, each in self._exchanges[stage][chunk].items()
            if ("every", phase) in getattr(each, phase).behind
        )
        return max(0.0, hideable / int(self.job.sizes.micro_batches) - pass_s)

    def reduced_s(self, timeline: Timeline) -> float:
        """When the gradients of all stages are reduced, from the step's start."""
        return max(self._stage_reduced_s(timeline, stage) for stage in range(self.job.layout.pp))

    def _stage_reduced_s(self, timeline: Timeline, stage: int) -> float:
        """Reductions of a stage follow each other.

        With overlap a chunk's begins in its last backward pass, bucket by bucket, on the first
        stage of a plain pipeline or without one; elsewhere behind that pass, while other stages
        work. Without overlap all begin when the stage is done.
        """
        overlapped = self.job.training.overlap_grad_reduce
        by_bucket = overlapped and stage == 0 and self.job.pipeline.vpp == 1
        starts, ends = timeline.backward_s[:, stage, :, -1]
        done = 0.0
        for chunk in ends.argsort():
            exchanges = self._exchanges[stage][chunk]
            spent = self._reduction_s(exchanges)
            if by_bucket:
                last_bucket_s = _exposed_s(exchanges, "backward", _GRADIENTS)
                done = max(max(done, starts[chunk]) + spent, ends[chunk] + last_bucket_s)
            else:
                ready = ends[chunk] if overlapped else timeline.end_s[stage]
                done = max(done, ready) + spent
        finishing = self._exchanges[stage][0]
        done = max(done, float(timeline.end_s[stage]))
        done += _backward_s(finishing, ("replicated_gradients",))
        if self.job.layout.pp > 1 and stage in (0, self.job.layout.pp - 1):
            done += _backward_s(finishing, ("tied_embedding",))
        return done

    def _reduction_s(self, exchanges: dict[str, Exchange]) -> float:
        """Of a chunk's gradients once a step; sharded ones (FSDP) are reduced in every pass."""
        if self.job.training.fsdp:
            return _exposed_s(exchanges, "backward", _GRADIENTS)
        return _backward_s(exchanges, _GRADIENTS)

    @cached_property
    def norm_s(self) -> float:
        """Sum of the gradients' norms over all ranks."""
        return _backward_s(self._exchanges[0][0], ("gradient_norm",))

    @cached_property
    def optimizer_s(self) -> float:
        """Norm, clipping and update on the stage with most parameters."""
        layout, training = self.job.layout, self.job.training
        dense_shards = expert_shards = 1
        if is_sharded(training) or training.fsdp:
            instances = training.num_distributed_optimizer_instances
            dense_shards = layout.dp * layout.cp // instances
            expert_shards = max(1, layout.edp // instances)
        return max(
            float(
                optimizer_seconds(
                    training,
                    self.machine.accelerator,
                    held=sum(count.total for count in stage),
                    updated=sum(
                        count.dense / dense_shards + count.expert / expert_shards for count in stage
                    ),
                    tensors=sum(count.tensors for count in stage),
                    host_factor=self.machine.stack.host,
                )
            )
            for stage in self._counts
        )


def _forward_s(exchanges: dict[str, Exchange], parts: tuple[str, ...]) -> float:
    return sum(float(exchanges[part].forward_s) for part in parts if part in exchanges)


def _backward_s(exchanges: dict[str, Exchange], parts: tuple[str, ...]) -> float:
    return sum(float(exchanges[part].backward_s) for part in parts if part in exchanges)


def _exposed_s(exchanges: dict[str, Exchange], phase: str, parts: tuple[str, ...]) -> float:
    return sum(
        float(getattr(exchanges[part], phase).exposed_s) for part in parts if part in exchanges
    )
