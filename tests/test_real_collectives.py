"""The list of a micro-batch's collectives against those that Megatron's own models make."""

from collections import Counter

import pytest
from real_activations import MICRO_BATCH, SEQUENCE
from real_collectives import Recorded, collectives_of, collectives_of_all
from real_models import Case

from piper_megatron.layout.collectives import (
    Collective,
    embedding_collectives,
    head_collectives,
    layer_collectives,
)
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.sizes import Sizes
from piper_megatron.workload.spec import Attention, Experts, ModelSpec, TrainingSpec

DENSE = ModelSpec(
    hidden=32,
    ffn=48,
    gated=True,
    attention=Attention(heads=4, groups=2, head_dim=8),
    moe_layers=(False, False),
    vocab=64,
    vocab_divisor=8,
    tied_embeddings=False,
    position="rope",
    max_positions=SEQUENCE,
    norm="RMSNorm",
    linear_bias=False,
)
EXPERTS = Experts(count=4, topk=2, ffn=24, shared_ffn=16)
MOE = DENSE.model_copy(update={"moe_layers": (True, True), "experts": EXPERTS})


def listed(case: Case, training: TrainingSpec) -> list[Collective]:
    """Of one micro-batch of the whole model, those in groups of several members."""
    layout = case.layout
    sizes = Sizes(
        **vars(layout), vpp=1, micro_batch=MICRO_BATCH, global_batch=MICRO_BATCH, seq=SEQUENCE
    )
    collectives = embedding_collectives(case.model, training, sizes)
    for moe in case.model.moe_layers:
        collectives += layer_collectives(case.model, training, sizes, moe=moe)
    collectives += head_collectives(case.model, training, sizes)
    return [each for each in collectives if layout.group_size(each.kind) > 1]


def in_groups(case: Case, recorded: list[Recorded]) -> list[Recorded]:
    """Without the loss's all-reduces of a tensor-parallel group of one."""
    alone = case.layout.tp == 1
    return [each for each in recorded if not (alone and each.operation == "all_reduce")]


def counted(collectives: list[Collective] | list[Recorded]) -> Counter:
    """How often each operation meets each size in each phase."""
    return Counter(
        (getattr(c.operation, "value", c.operation), round(c.tensor_bytes), c.phase)
        for c in collectives
    )


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallel_collectives_are_megatrons(ranks, sequence_parallel):
    case = Case(model=DENSE, layout=ParallelLayout(world=2, tp=2))
    training = TrainingSpec(precision="bf16", sequence_parallel=sequence_parallel)
    settings = {"sequence_parallel": sequence_parallel}
    run = ranks.call(collectives_of_all, [(case, settings)], world=1).check()
    assert counted(run.values[0][0]) == counted(listed(case, training))


@pytest.mark.parametrize("sizes", [{"ep": 4}, {"tp": 2, "ep": 2, "etp": 2}])
@pytest.mark.parametrize("router_dtype", [None, "fp32"])
def test_allgather_dispatchers_collectives_are_megatrons(ranks, sizes, router_dtype):
    case = Case(model=MOE, layout=ParallelLayout(world=4, **sizes))
    settings = {"moe_token_dispatcher_type": "allgather", "moe_router_dtype": router_dtype}
    run = ranks.call(collectives_of_all, [(case, settings)], world=1).check()
    training = TrainingSpec(
        precision="bf16",
        dispatcher="allgather",
        moe_router_dtype=router_dtype,
        sequence_parallel=case.layout.tp > 1,
    )
    assert counted(in_groups(case, run.values[0][0])) == counted(listed(case, training))


@pytest.mark.parametrize("sizes", [{"ep": 4}, {"tp": 2, "ep": 4}])
def test_alltoall_dispatchers_collectives_are_megatrons_in_sum(ranks, sizes):
    """Ranks hold unequal numbers of rows of a real batch, all of them together what is listed."""
    case = Case(model=MOE, layout=ParallelLayout(world=4, **sizes))
    settings = {"moe_token_dispatcher_type": "alltoall"}
    run = ranks.call(collectives_of, case, settings, None, world=4).check()
    training = TrainingSpec(
        precision="bf16", dispatcher="alltoall", sequence_parallel=case.layout.tp > 1
    )
    held: Counter = Counter()
    for recorded in run.values:
        for each in in_groups(case, recorded):
            held[each.operation, each.phase] += each.tensor_bytes
        counts = [each for each in recorded if each.tensor_bytes == 8 * EXPERTS.count * 4]
        assert len(counts) == len(MOE.moe_layers)
        held["all_gather", "forward"] -= sum(each.tensor_bytes for each in counts)
    expected: Counter = Counter()
    for collective in listed(case, training):
        expected[collective.operation.value, collective.phase] += 4 * collective.tensor_bytes
    assert +held == expected
