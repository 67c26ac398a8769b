"""Traffic: how many bytes a rank sends per training step inside each kind of group.

First-order volumes, good enough to tell placements apart: balanced routing, the same layers on
every stage, no recomputation. The mean over ranks is given; patterns say who the bytes go to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache

from piper_megatron.layout.collectives import (
    Collective,
    Operation,
    boundary_bytes,
    dense_parameters,
    expert_parameters,
    gradient_collectives,
    layer_collectives,
)
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.sizes import Sizes
from piper_megatron.workload.spec import Attention, BatchSpec, Experts, ModelSpec, TrainingSpec


class Pattern(Enum):
    """Who talks to whom inside a group.

    ALL_TO_ALL: every member sends equally to every other one.
    CHAIN: members exchange with their neighbours in group order.
    RING: as CHAIN, and the last member with the first.
    COLLECTIVE: a ring in which members on one node stand side by side, as NCCL and RCCL build it.
    """

    ALL_TO_ALL = "all-to-all"
    CHAIN = "chain"
    RING = "ring"
    COLLECTIVE = "collective ring"


@dataclass(frozen=True)
class Flow:
    """Bytes that a rank sends per step in one kind of group (mean over ranks), and to whom."""

    bytes_per_rank: float
    pattern: Pattern


@dataclass(frozen=True)
class Traffic:
    """Flows of a training step: kind of group -> flow; and whose sizes they come from."""

    flows: dict[str, Flow]
    model: str


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, without its layout.

    Attributes:
        model, batch, training: as in `layout.job.Job`.
        virtual_stages: model chunks of a pipeline stage (VPP).
    """

    model: ModelSpec
    batch: BatchSpec
    training: TrainingSpec
    virtual_stages: int = 1


def default_workload(layout: ParallelLayout) -> Workload:
    """A well-known MoE, for a layout whose model is not known."""
    return Workload(
        model=_qwen3_235b(),
        batch=BatchSpec(seq=4096, micro_batch=1, global_batch=16 * layout.dp),
        training=TrainingSpec(precision="bf16", dispatcher="alltoall"),
    )


@cache
def _qwen3_235b() -> ModelSpec:
    """config.json of Qwen/Qwen3-235B-A22B on Hugging Face: every layer has experts, plain GQA."""
    return ModelSpec(
        name="Qwen3-235B-A22B, 16 micro-batches of one 4096-token sequence",
        hidden=4096,
        ffn=12288,
        gated=True,
        attention=Attention(heads=64, groups=4, head_dim=128),
        moe_layers=(True,) * 94,
        experts=Experts(count=128, topk=8, ffn=1536),
        vocab=151936,
        max_positions=40960,
    )


def traffic_of(layout: ParallelLayout, workload: Workload | None = None) -> Traffic:
    """Flows of one training step for every kind of group that has more than one member."""
    workload = workload or default_workload(layout)
    sizes = _sizes(layout, workload)
    flows: dict[str, Flow] = {}
    for collective, times in _collectives(workload, sizes):
        members = layout.group_size(collective.kind)
        sent = float(times * collective.sent_bytes(members))
        if sent > 0:
            pattern = _pattern(collective.operation)
            before = flows.get(collective.kind, Flow(0.0, pattern))
            assert before.pattern is pattern, "a kind of group has one pattern"
            flows[collective.kind] = Flow(before.bytes_per_rank + sent, pattern)
    if layout.pp > 1:
        flows["pp"] = _pipeline(workload, sizes)
    return Traffic(flows, workload.model.name)


def _sizes(layout: ParallelLayout, workload: Workload) -> Sizes:
    batch = workload.batch
    return Sizes(
        world=layout.world,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        ep=layout.ep,
        etp=layout.etp,
        vpp=workload.virtual_stages,
        micro_batch=batch.micro_batch,
        # a ramp-up may start below one micro-batch for each replica
        global_batch=max(batch.global_batch, batch.micro_batch * layout.dp),
        seq=batch.seq,
    )


def _pattern(operation: Operation) -> Pattern:
    match operation:
        case Operation.ALL_TO_ALL:
            return Pattern.ALL_TO_ALL
        case Operation.SEND_RECEIVE:
            return Pattern.RING
    return Pattern.COLLECTIVE


def _collectives(workload: Workload, sizes: Sizes) -> Iterator[tuple[Collective, float]]:
    """Every collective of a rank and how often it happens in a step."""
    model, training = workload.model, workload.training
    moe_layers = sum(model.moe_layers)
    for layers, moe in ((model.layers - moe_layers, False), (moe_layers, True)):
        if layers:
            times = float(layers / sizes.pp * sizes.micro_batches)
            for collective in layer_collectives(model, training, sizes, moe=moe):
                yield collective, times
    for collective in gradient_collectives(
        training,
        dense_parameters(model) / (sizes.pp * sizes.tp),
        expert_parameters(model) / (sizes.pp * sizes.ep * sizes.etp),
    ):
        yield collective, 1.0


def _pipeline(workload: Workload, sizes: Sizes) -> Flow:
    """Activations forward and their gradients backward over every boundary between chunks."""
    boundaries = sizes.pp * sizes.vpp - 1
    each = 2 * boundary_bytes(workload.model, workload.training, sizes)
    sent = sizes.micro_batches * boundaries / sizes.pp * each
    return Flow(float(sent), Pattern.RING if sizes.vpp > 1 else Pattern.CHAIN)
