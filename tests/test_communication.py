"""Exchanges of layers and steps: against the placement's traffic, and what hides them."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import platform, transfer

from piper_megatron.layout.collectives import (
    boundary_bytes,
    dense_parameters,
    expert_parameters,
    replicated_parameters,
)
from piper_megatron.layout.crossing import bytes_by_level
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.sizes import Sizes
from piper_megatron.layout.traffic import Workload, traffic_of
from piper_megatron.platform.platform import load_platform
from piper_megatron.platform.topology import Location, Node, Topology
from piper_megatron.resources.communication import (
    boundary_seconds,
    embedding_communication,
    head_communication,
    layer_communication,
    step_communication,
)
from piper_megatron.resources.compute import layer_compute
from piper_megatron.workload.spec import Attention, BatchSpec, Experts, ModelSpec, TrainingSpec

EXPERTS = Experts(count=64, topk=4, ffn=256, shared_ffn=256)
MODEL = ModelSpec(
    hidden=512,
    ffn=1024,
    gated=True,
    attention=Attention(heads=16, groups=8, head_dim=32),
    moe_layers=(False, True) * 4,
    experts=EXPERTS,
    vocab=32000,
    tied_embeddings=False,
    max_positions=4096,
    norm="RMSNorm",
)
TRAINING = TrainingSpec(
    precision="bf16",
    dispatcher="alltoall",
    sequence_parallel=True,
    use_distributed_optimizer=True,
    main_grads_dtype="fp32",
)


def sizes_of(vpp: int = 1, micro_batches: int = 8, **grid: int) -> Sizes:
    layout = ParallelLayout(**grid)
    return Sizes(
        **asdict(layout),
        vpp=vpp,
        micro_batch=1,
        global_batch=micro_batches * layout.dp,
        seq=4096,
    )


def layer(sizes: Sizes, *, moe: bool = True, where=None, imbalance: float = 1.0, **training):
    spec = TRAINING.model_copy(update=training)
    return layer_communication(
        MODEL, spec, sizes, where or platform(), moe=moe, imbalance=imbalance
    )


def step(sizes: Sizes, where=None, model: ModelSpec = MODEL, **training):
    spec = TRAINING.model_copy(update=training)
    return step_communication(
        model,
        spec,
        sizes,
        where or platform(),
        dense_elements=dense_parameters(MODEL) / (sizes.pp * sizes.tp),
        expert_elements=expert_parameters(MODEL) / (sizes.pp * sizes.ep * sizes.etp),
    )


@st.composite
def grids(draw):
    """Grids on whole nodes of eight, sizes powers of two."""
    power = st.sampled_from([1, 2, 4, 8])
    tp, cp, pp, ep = (draw(power) for _ in range(4))
    etp = draw(st.sampled_from([e for e in (1, 2, 4, 8) if e <= tp]))
    stage = max(tp * cp, etp * ep, 8) * draw(power)
    return {"world": stage * pp, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(grids(), st.sampled_from(["alltoall", "allgather"]))
def test_bytes_of_a_step_are_those_that_the_placement_counts_on_real_ranks(grid, dispatcher):
    sizes = sizes_of(**grid)
    where, layout = platform(), ParallelLayout(**grid)
    training = TRAINING.model_copy(update={"dispatcher": dispatcher})
    hosts = [f"n{i}" for i in range(layout.world // 8)]
    topology = Topology("nodes", where.network(), tuple(map(Node, hosts)))
    domains = topology.domains([Location(host, i) for host in hosts for i in range(8)])
    workload = Workload(
        model=MODEL,
        batch=BatchSpec(seq=4096, micro_batch=1, global_batch=sizes.global_batch),
        training=training,
    )
    traffic = traffic_of(layout, workload)
    traffic.flows.pop("pp", None)
    counted = bytes_by_level(layout, traffic, topology, domains)

    found = np.zeros(2)
    passes = sizes.micro_batches / sizes.pp
    for moe in MODEL.moe_layers:
        for exchange in layer(sizes, moe=moe, dispatcher=dispatcher).values():
            found += passes * np.array([float(sent) for sent in exchange.bytes_by_level])
    for name in ("gradients", "expert_gradients", "parameters", "expert_parameters"):
        found += [float(sent) for sent in step(sizes)[name].bytes_by_level]
    # a CP ring of neighbours crosses nodes as one that stands side by side does
    counts = float(EXPERTS.count) * 8 * (sizes.etp * sizes.ep - 1) * passes * 4
    assert sum(found) == pytest.approx(sum(counted), abs=counts + 1, rel=1e-9)
    assert found == pytest.approx(counted, abs=counts + 1, rel=1e-9)


def test_layers_have_the_parts_of_their_kind():
    sizes = sizes_of(world=16, tp=2, cp=2, ep=4)
    assert list(layer(sizes, moe=False)) == ["attention", "context", "mlp"]
    moe = ["attention", "context", "shared_experts", "dispatch", "combine"]
    assert list(layer(sizes)) == moe
    assert list(layer(sizes, dispatcher="allgather")) == moe


def test_one_rank_communicates_nothing():
    sizes = sizes_of(world=1)
    for moe in (True, False):
        for exchange in layer(sizes, moe=moe).values():
            assert float(exchange.forward_s) == float(exchange.backward_s) == 0
    assert all(float(each.backward_s) == 0 for each in step(sizes).values())
    assert float(boundary_seconds(MODEL, TRAINING, sizes, platform())) == 0


def test_everything_that_hides_an_exchange_is_computed_somewhere():
    sizes = sizes_of(world=16, tp=2, cp=2, ep=4)
    where = load_platform("dgx-h100")
    for overlap in (
        {"tp_comm_overlap": True},
        {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
        {"moe_shared_expert_overlap": True},
    ):
        spec = TRAINING.model_copy(update=overlap)
        for moe in (True, False):
            work = layer_compute(MODEL, spec, sizes, where.need_accelerator(), moe=moe)
            for exchange in layer(sizes, moe=moe, where=where, **overlap).values():
                for part, phase in (*exchange.forward.behind, *exchange.backward.behind):
                    assert part in work
                    assert hasattr(work[part], f"{phase}_s")


def test_tensor_parallel_exchanges_hide_as_megatron_starts_them():
    sizes = sizes_of(world=8, tp=4)
    plain = layer(sizes, moe=False)["mlp"]
    # of the backward pass, the second gather and the scatter run beside products of the weights
    assert float(plain.forward.hideable_s) == 0
    assert float(plain.backward.hideable_s) == pytest.approx(2 * float(plain.backward.exposed_s))
    assert plain.backward.behind == (("mlp", "backward"),)
    pieces = layer(sizes, moe=False, tp_comm_overlap=True)["mlp"]
    assert pieces.forward.behind == (("mlp", "forward"),)
    assert float(pieces.forward.exposed_s) == pytest.approx(float(pieces.forward_s) / 4)
    without = layer(sizes, moe=False, sequence_parallel=False)["mlp"]
    assert float(without.forward.hideable_s) == 0
    assert float(without.backward.exposed_s) == 0  # its only all-reduce is beside the weights


def test_expert_exchanges_hide_behind_the_other_micro_batch():
    sizes = sizes_of(world=8, ep=8)
    plain = layer(sizes)
    assert plain["dispatch"].forward.behind == plain["combine"].backward.behind == ()
    overlapped = layer(sizes, overlap_moe_expert_parallel_comm=True)
    dispatch, combine = overlapped["dispatch"], overlapped["combine"]
    assert ("experts", "backward") in dispatch.forward.behind
    assert ("experts", "forward") in dispatch.backward.behind
    assert ("attention", "backward") in combine.forward.behind
    assert ("attention", "forward") in combine.backward.behind
    assert ("experts", "weight") not in dispatch.backward.behind
    late = layer(sizes, overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)
    assert ("experts", "weight") in late["dispatch"].backward.behind
    # nothing becomes faster by being hidden
    assert float(dispatch.forward_s) == pytest.approx(float(plain["dispatch"].forward_s))
    shared = layer(sizes, moe_shared_expert_overlap=True)
    assert shared["dispatch"].forward.behind == (("shared_experts", "forward"),)


@pytest.mark.parametrize(
    ("recomputation", "repeated"),
    [
        ({}, set()),
        ({"recompute_granularity": "full"}, {"attention", "context", "dispatch", "combine"}),
        ({"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}, {"context"}),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
            {"dispatch", "combine"},
        ),
        ({"recompute_granularity": "selective", "recompute_modules": ("moe_act",)}, set()),
    ],
)
def test_recomputation_repeats_the_exchanges_inside_it(recomputation, repeated):
    exchanges = layer(sizes_of(world=16, tp=2, cp=2, ep=4), **recomputation)
    exchanges.pop("shared_experts")
    for part, exchange in exchanges.items():
        again = float(exchange.forward_s) if part in repeated else 0
        assert float(exchange.recompute_s) == again


def test_load_of_the_busiest_rank_and_capacity():
    sizes = sizes_of(world=8, ep=8)
    even, uneven = (float(layer(sizes, imbalance=load)["combine"].forward_s) for load in (1.0, 1.5))
    assert uneven == pytest.approx(1.5 * even)
    dropping = MODEL.model_copy(
        update={"experts": EXPERTS.model_copy(update={"capacity_factor": 1.2})}
    )
    capped = layer_communication(dropping, TRAINING, sizes, platform(), moe=True, imbalance=1.5)
    assert float(capped["combine"].forward_s) == pytest.approx(1.2 * even)


def test_recomputation_repeats_the_rows_and_megatrons_counts_but_not_pipers_plan():
    sizes = sizes_of(world=32, ep=32)
    full = {"recompute_granularity": "full"}
    megatrons, flat = (layer(sizes, dispatcher=name, **full) for name in ("alltoall", "flat"))
    assert float(megatrons["dispatch"].recompute_s) == float(megatrons["dispatch"].forward_s)
    assert float(flat["dispatch"].recompute_s) < float(flat["dispatch"].forward_s)
    assert float(flat["combine"].recompute_s) == float(flat["combine"].forward_s)


def test_dispatchers_differ_only_in_dispatch_and_combine():
    sizes = sizes_of(world=32, ep=32)
    for dispatcher in ("flex", "flat", "2dh", "halo", "rail", "rbd", "auto"):
        exchanges = layer(sizes, dispatcher=dispatcher)
        assert set(exchanges) == set(layer(sizes))
        assert float(exchanges["dispatch"].forward_s) > 0
    rail, flat = (
        float(layer(sizes, dispatcher=name)["combine"].bytes_by_level[1])
        for name in ("rail", "flat")
    )
    assert rail < 0.7 * flat


def test_expert_tensor_parallelism_gathers_rows_unless_kernels_send_them_everywhere():
    sizes = sizes_of(world=8, tp=2, ep=4, etp=2)
    alone = sizes_of(world=8, tp=2, ep=4, etp=1)
    for dispatcher in ("alltoall", "flex"):
        shared = layer(sizes, dispatcher=dispatcher)["combine"]
        assert sum(map(float, shared.bytes_by_level)) > 1.2 * sum(
            map(float, layer(alone, dispatcher=dispatcher)["combine"].bytes_by_level)
        )


def test_boundaries_carry_activations_over_each_ranks_share_of_the_nics():
    sizes = sizes_of(world=32, pp=4)
    whole = 4096 * 512 * 2
    assert float(boundary_bytes(MODEL, TRAINING, sizes)) == whole
    seconds = boundary_seconds(MODEL, TRAINING, sizes, platform())
    assert float(seconds) == pytest.approx(whole / 12.5e9)
    assert float(
        boundary_seconds(MODEL, TRAINING, replace(sizes, tp=2), platform())
    ) == pytest.approx(whole / 2 / 12.5e9)
    # packed replicas keep every pipeline in one place: here, all stages in a node
    small = sizes_of(world=32, pp=2)
    packed = boundary_seconds(MODEL, TRAINING, small, load_platform("frontier"), order="piper")
    assert float(packed) <= float(
        boundary_seconds(MODEL, TRAINING, small, load_platform("frontier"))
    )


def test_ends_of_the_model():
    sizes = sizes_of(world=8, tp=8)
    tensor = 4096 * 512 * 2 * 7 / 8 / 50e9
    embedding = embedding_communication(MODEL, TRAINING, sizes, platform())
    assert float(embedding.forward_s) == float(embedding.backward_s) == pytest.approx(tensor)
    head = head_communication(MODEL, TRAINING, sizes, platform())
    losses = 3 * 2 * 4096 * 4 * 7 / 8 / 50e9
    assert float(head.forward_s) == pytest.approx(tensor + losses)
    assert float(head.backward.hideable_s) == pytest.approx(2 * tensor)


def test_gradients_and_parameters_of_replicas():
    sizes = sizes_of(world=16, ep=8)
    exchanges = step(sizes)
    dense = dense_parameters(MODEL) * 4 * 15 / 16
    gradients = exchanges["gradients"]
    assert sum(map(float, gradients.bytes_by_level)) == pytest.approx(dense)
    assert float(gradients.backward.exposed_s) > 0
    assert gradients.backward.behind == ()
    assert float(exchanges["parameters"].forward_s) == pytest.approx(
        float(gradients.backward_s) / 2
    )
    # two replicas of an expert, one on each node
    experts = expert_parameters(MODEL) / 8 * 4 / 2
    assert float(exchanges["expert_gradients"].backward_s) == pytest.approx(experts / 12.5e9)
    all_reduced = step(sizes, use_distributed_optimizer=False)
    assert "parameters" not in all_reduced
    assert float(all_reduced["gradients"].backward_s) == pytest.approx(
        2 * float(gradients.backward_s)
    )


def test_all_but_a_bucket_hides():
    sizes = sizes_of(world=16, ep=8)
    overlapped = step(
        sizes, overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=1_000_000
    )
    gradients, parameters = overlapped["gradients"].backward, overlapped["parameters"].forward
    assert gradients.behind == (("last", "backward"),)
    assert parameters.behind == (("first", "forward"),)
    share = 1e6 / dense_parameters(MODEL)
    assert float(gradients.exposed_s / gradients.seconds) == pytest.approx(share)
    assert float(parameters.exposed_s / parameters.seconds) == pytest.approx(share)
    default = step(sizes, overlap_grad_reduce=True)["gradients"].backward
    share = 40e6 / dense_parameters(MODEL)
    assert float(default.exposed_s / default.seconds) == pytest.approx(share)


def test_optimizer_instances_keep_their_shards_near():
    sizes = sizes_of(world=64)
    one, four = (step(sizes, num_distributed_optimizer_instances=n) for n in (1, 8))
    parameters = four["parameters"]
    assert float(parameters.bytes_by_level[1]) == 0 < float(one["parameters"].bytes_by_level[1])
    shard = dense_parameters(MODEL) * 4 / 8
    across = float(four["gradients"].bytes_by_level[1])
    assert across == pytest.approx(shard * 2 * 7 / 8)


def test_fully_sharded_training_gathers_in_every_pass():
    sizes = sizes_of(world=16)
    once = step(sizes)
    sharded = step(sizes, fsdp="megatron", data_parallel_sharding_strategy="optim_grads_params")
    parameters = sharded["parameters"]
    assert (
        float(parameters.forward_s)
        == float(parameters.backward_s)
        == pytest.approx(8 * float(once["parameters"].forward_s))
    )
    assert parameters.forward.behind == (("every", "forward"),)


def test_tied_embeddings_and_replicated_weights_add_up_their_gradients():
    sizes = sizes_of(world=16, tp=2, pp=2)
    assert float(step(sizes)["tied_embedding"].backward_s) == 0
    tied = step(sizes, model=MODEL.model_copy(update={"tied_embeddings": True}))
    tensor = 32000 / 2 * 512 * 4
    assert float(tied["tied_embedding"].backward_s) == pytest.approx(tensor / 12.5e9, rel=1e-3)
    replicated = step(sizes)["replicated_gradients"]
    norms_and_routers = 8 * 2 * 512 + 4 * 512 * 64
    assert replicated_parameters(MODEL) == norms_and_routers
    assert float(replicated.backward_s) == pytest.approx(norms_and_routers / 2 * 4 / 50e9)
    assert float(step(sizes, sequence_parallel=False)["replicated_gradients"].backward_s) == 0


def test_norms_take_two_all_reduces_of_a_number():
    where = platform(between=transfer(startup_s=1.0))
    assert float(step(sizes_of(world=64), where)["gradient_norm"].backward_s) == pytest.approx(
        2, rel=1e-6
    )


def test_many_layouts_at_once_equal_each_alone():
    grids = [
        {"tp": tp, "pp": pp, "ep": ep, "cp": cp}
        for tp in (1, 4)
        for pp in (1, 4)
        for ep in (1, 16)
        for cp in (1, 2)
    ]
    rows = [sizes_of(world=256, **grid) for grid in grids]
    names = ("world", "tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch")
    together = Sizes(
        **{name: np.array([getattr(row, name) for row in rows]) for name in names},
        global_batch=rows[0].global_batch,
        seq=4096,
    )
    where = load_platform("frontier")
    for dispatcher in ("alltoall", "allgather", "flex", "auto"):
        many = layer(together, where=where, dispatcher=dispatcher)
        alone = [layer(row, where=where, dispatcher=dispatcher) for row in rows]
        for part, exchange in many.items():
            for seconds in ("forward_s", "backward_s"):
                each = [float(getattr(one[part], seconds)) for one in alone]
                assert np.allclose(np.broadcast_to(getattr(exchange, seconds), 16), each)
    many_steps, steps = step(together, where), [step(row, where) for row in rows]
    for part, exchange in many_steps.items():
        each = [float(one[part].backward_s) for one in steps]
        assert np.allclose(np.broadcast_to(exchange.backward_s, 16), each)
    boundaries = boundary_seconds(MODEL, TRAINING, together, where)
    each = [float(boundary_seconds(MODEL, TRAINING, row, where)) for row in rows]
    assert np.allclose(boundaries, each)
