"""Bytes per step against counts made in another way, and what placements make them cost."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_megatron.layout.collectives import dense_parameters
from piper_megatron.layout.crossing import (
    bytes_by_level,
    communication_seconds,
    crossing_shares,
    meeting_shares,
)
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.traffic import (
    Flow,
    Pattern,
    Traffic,
    Workload,
    traffic_of,
)
from piper_megatron.platform.topology import Level, Location, Node, Topology
from piper_megatron.workload.spec import Attention, BatchSpec, Experts, ModelSpec, TrainingSpec

BATCH = BatchSpec(seq=16, micro_batch=2, global_batch=2 * 3)
TRAINING = TrainingSpec(precision="bf16", dispatcher="alltoall", sequence_parallel=False)
TINY = ModelSpec(
    hidden=8,
    ffn=32,
    gated=True,
    attention=Attention(heads=2, groups=2, head_dim=4),
    moe_layers=(False, False, True, True),
    experts=Experts(count=4, topk=2, ffn=12),
    vocab=100,
    max_positions=16,
)


def workload(layout: ParallelLayout, virtual_stages: int = 1, **training) -> Workload:
    """The tiny model with three micro-batches on every replica."""
    return Workload(
        model=TINY,
        batch=BATCH.model_copy(update={"global_batch": 6 * layout.dp}),
        training=TRAINING.model_copy(update=training),
        virtual_stages=virtual_stages,
    )


def bytes_of(kind: str, world: int, *, sizes: dict[str, int], **training) -> float:
    layout = ParallelLayout(world=world, **sizes)
    return traffic_of(layout, workload(layout, **training)).flows[kind].bytes_per_rank


def test_gradients_add_up_to_the_published_size_of_the_default_model():
    # with two replicas a ring all-reduce sends every gradient byte once
    flows = traffic_of(ParallelLayout(world=2)).flows
    assert (flows["dp"].bytes_per_rank + flows["edp"].bytes_per_rank) / 4 == pytest.approx(
        235e9, rel=0.005
    )


def test_expert_all_to_all_sends_every_routed_copy_that_leaves_its_rank():
    tokens, copies = 16 * 2, 2
    away = tokens * copies * 3 / 4  # 3 of 4 copies leave; 8 wide, 2 bytes
    moe_layer_passes = 2 * 3
    probabilities = 2 * away * 2  # not on the way back
    sent = moe_layer_passes * (4 * away * 8 * 2 + probabilities)
    assert bytes_of("ep", 4, sizes={"ep": 4}) == sent


def test_all_gather_dispatcher_sends_every_token_to_all_members_of_the_tp_ep_group():
    tokens, passes = 16 * 2, 2 * 3
    there_and_back = 4 * 3 * tokens * 8 * 2
    # of 4 experts a probability, and forward a byte of the routing map
    beside = 3 * tokens * 4 * (2 * 2 + 1)
    sent = bytes_of("tp_ep", 4, sizes={"ep": 4}, dispatcher="allgather")
    assert sent == passes * (there_and_back + beside)


def test_pipeline_sends_activations_and_gradients_over_every_boundary():
    activation = 16 * 2 * 8 * 2
    boundaries = 3
    in_all = 2 * 3 * boundaries * activation  # micro-batches, forward and backward
    assert bytes_of("pp", 4, sizes={"pp": 4}) * 4 == in_all


def test_tensor_parallelism_all_reduces_twice_around_attention_and_dense_mlps():
    # 4 layers have attention, 2 of them a dense MLP; two ranks send the whole tensor once each
    activation = 16 * 2 * 8 * 2
    assert bytes_of("tp", 2, sizes={"tp": 2}) == 3 * 2 * (4 + 2) * activation


def test_sequence_parallelism_gathers_the_input_once_more():
    plain = bytes_of("tp", 2, sizes={"tp": 2})
    parallel = bytes_of("tp", 2, sizes={"tp": 2}, sequence_parallel=True)
    assert parallel == plain * 5 / 4


@pytest.mark.parametrize(("how", "kv_blocks"), [("p2p", 3), ("all_gather", 3), ("a2a", 4)])
def test_context_parallelism_passes_keys_and_values_or_heads(how, kv_blocks):
    keys_and_values = 16 * 2 / 2 * 2 * 8 * 2
    sent = bytes_of("cp", 2, sizes={"cp": 2}, cp_comm_type=how)
    # exchanged heads: half of queries, keys, values and outputs leaves, forward and backward
    expected = kv_blocks / 2 if how == "a2a" else kv_blocks
    assert sent == 4 * 3 * expected * keys_and_values


@pytest.mark.parametrize(
    ("kind", "axes", "parallel"),
    [
        ("pp", {"tp": 2}, True),  # each tensor-parallel rank sends its part
        ("pp", {"cp": 2}, False),
        ("ep", {"tp": 2}, True),
        ("ep", {"cp": 2}, False),
        ("edp", {"etp": 2}, False),
    ],
)
def test_other_axes_divide_the_work(kind, axes, parallel):
    sizes = {"pp": 2, "ep": 4, "etp": 1}
    once = bytes_of(kind, 64, sizes=sizes, sequence_parallel=parallel)
    divided = bytes_of(kind, 128, sizes=sizes | axes, sequence_parallel=parallel)
    assert divided == pytest.approx(once / 2)


def test_without_sequence_parallelism_every_tensor_rank_sends_the_whole_activation():
    sizes = {"pp": 2}
    assert bytes_of("pp", 4, sizes=sizes | {"tp": 2}) == bytes_of("pp", 2, sizes=sizes)


def test_only_groups_with_members_and_bytes_have_traffic():
    def kinds(model: ModelSpec = TINY, **sizes: int) -> set[str]:
        layout = ParallelLayout(**sizes)
        given = workload(layout)
        with_model = Workload(model=model, batch=given.batch, training=given.training)
        return set(traffic_of(layout, with_model).flows)

    assert kinds(world=8, pp=2, ep=4) == {"pp", "ep", "dp"}
    dense = TINY.model_copy(update={"moe_layers": (False,) * 4, "experts": None})
    assert kinds(dense, world=8, pp=2, ep=2) == {"pp", "dp"}
    everything = {"tp", "cp", "ep", "etp", "pp", "dp", "edp"}
    assert kinds(world=64, tp=2, cp=2, pp=2, ep=2, etp=2) == everything


def test_virtual_stages_close_the_pipeline_to_a_ring():
    layout = ParallelLayout(world=4, pp=4)
    assert traffic_of(layout, workload(layout)).flows["pp"].pattern is Pattern.CHAIN
    flow = traffic_of(layout, workload(layout, virtual_stages=3)).flows["pp"]
    assert flow.pattern is Pattern.RING
    assert flow.bytes_per_rank == bytes_of("pp", 4, sizes={"pp": 4}) * 11 / 3


@pytest.mark.parametrize(
    ("settings_of_adam", "bytes_per_parameter"),
    [
        ({"main_grads_dtype": "fp32"}, 8),  # an all-reduce sends twice
        ({"main_grads_dtype": "bf16"}, 4),
        ({"use_distributed_optimizer": True, "main_grads_dtype": "fp32"}, 4 + 2),
        ({"use_distributed_optimizer": True, "main_grads_dtype": "bf16"}, 2 + 2),
        (
            {
                "use_distributed_optimizer": True,
                "fp8_param_gather": True,
                "fp8_recipe": "blockwise",
            },
            4 + 1,
        ),
    ],
)
def test_gradients_and_parameters_travel_in_their_own_formats(
    settings_of_adam, bytes_per_parameter
):
    sent = bytes_of("dp", 2, sizes={}, **settings_of_adam)
    assert sent == dense_parameters(TINY) * bytes_per_parameter / 2


@st.composite
def grouped_ranks(draw):
    """Groups of ranks, and nested domains (node, switch, machine) of the ranks."""
    count, size = draw(st.integers(1, 4)), draw(st.integers(2, 7))
    world = count * size
    node = np.array(draw(st.lists(st.integers(0, 5), min_size=world, max_size=world)))
    domains = np.column_stack([node, node // 2, np.zeros(world, dtype=int)])
    groups = np.random.default_rng(draw(st.integers(0, 99))).permutation(world)
    return groups.reshape(count, size), domains


def pairs(group: list[int], pattern: Pattern, node: np.ndarray) -> list[tuple[int, int]]:
    """Sender and receiver of every message, written down one by one."""
    if pattern is Pattern.ALL_TO_ALL:
        return [(a, b) for a in group for b in group if a != b]
    if pattern is Pattern.COLLECTIVE:
        nodes = list(dict.fromkeys(int(node[rank]) for rank in group))
        group = sorted(group, key=lambda rank: nodes.index(int(node[rank])))
    following = list(pairwise(group))
    return following if pattern is Pattern.CHAIN else [*following, (group[-1], group[0])]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(grouped_ranks(), st.sampled_from(Pattern))
def test_meeting_shares_count_every_message(grouped, pattern):
    groups, domains = grouped
    messages = [p for group in groups.tolist() for p in pairs(group, pattern, domains[:, 0])]
    met = np.zeros(3)
    for a, b in messages:
        met[next(level for level in range(3) if domains[a, level] == domains[b, level])] += 1
    shares = meeting_shares(groups, pattern, domains, node_level=0)
    assert np.allclose(shares, met / len(messages))
    assert math.isclose(shares.sum(), 1)


TWO_NODES = Topology("two", (Level("node", 10), Level("machine", 1)), (Node("a"), Node("b")))
FOUR_RANKS = [Location("a", 0), Location("a", 1), Location("b", 0), Location("b", 1)]


def test_cost_is_bytes_by_the_bandwidth_where_they_meet():
    domains = TWO_NODES.domains(FOUR_RANKS)
    layout = ParallelLayout(world=4, pp=2, ep=2)
    traffic = Traffic({"ep": Flow(3e9, Pattern.ALL_TO_ALL), "pp": Flow(5e9, Pattern.CHAIN)}, "")
    assert (
        communication_seconds(bytes_by_level(layout, traffic, TWO_NODES, domains), TWO_NODES)
        == 3 / 10 + 5 / 1
    )
    swapped = domains[[0, 2, 1, 3]]
    assert (
        communication_seconds(bytes_by_level(layout, traffic, TWO_NODES, swapped), TWO_NODES)
        == 3 / 1 + 5 / 10
    )


def test_crossing_shares_leave_out_the_outermost_level_and_single_members():
    domains = TWO_NODES.domains(FOUR_RANKS)
    shares = crossing_shares(ParallelLayout(world=4, pp=2, ep=2), TWO_NODES, domains)
    assert shares == {"tp_ep": {"node": 0.0}, "pp": {"node": 1.0}, "dp": {"node": 0.0}}
    half = domains[[0, 2, 1, 3]][[0, 1, 3, 2]]
    shares = crossing_shares(ParallelLayout(world=4, ep=2), TWO_NODES, half)
    assert shares["tp_ep"] == {"node": 1.0}
