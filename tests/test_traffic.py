"""Bytes per step against counts made in another way, and what placements make them cost."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_megatron.errors import LayoutError
from piper_megatron.layout.crossing import (
    bytes_by_level,
    communication_seconds,
    crossing_shares,
    meeting_shares,
)
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.traffic import (
    DEFAULT_MODEL,
    Flow,
    ModelSizes,
    Pattern,
    Traffic,
    traffic_of,
)
from piper_megatron.platform.topology import Level, Location, Node, Topology

TINY = ModelSizes(
    name="tiny",
    layers=4,
    hidden=8,
    ffn=32,
    heads=2,
    kv_heads=2,
    head_dim=4,
    vocab=100,
    seq=16,
    micro_batch=2,
    micro_batches=3,
    moe_layers=2,
    moe_ffn=12,
    experts=4,
    topk=2,
)


def bytes_of(kind: str, model: ModelSizes = TINY, **layout: int) -> float:
    return traffic_of(ParallelLayout(**layout), model).flows[kind].bytes_per_rank


def test_gradients_add_up_to_the_published_size_of_the_default_model():
    # with two replicas a ring all-reduce sends every gradient byte once
    parameters = (
        bytes_of("dp", DEFAULT_MODEL, world=2) + bytes_of("edp", DEFAULT_MODEL, world=2)
    ) / 4
    assert parameters == pytest.approx(235e9, rel=0.005)


def test_expert_all_to_all_sends_every_routed_copy_that_leaves_its_rank():
    tokens, copies = 16 * 2, 2
    dispatch = tokens * copies * 8 * 2 * 3 / 4  # 3 of 4 copies leave; 8 wide, 2 bytes
    moe_layer_passes = 2 * 3
    assert bytes_of("ep", world=4, ep=4) == 4 * moe_layer_passes * dispatch


def test_pipeline_sends_activations_and_gradients_over_every_boundary():
    activation = 16 * 2 * 8 * 2
    boundaries = 3
    in_all = 2 * 3 * boundaries * activation  # micro-batches, forward and backward
    assert bytes_of("pp", world=4, pp=4) * 4 == in_all


def test_tensor_parallelism_all_reduces_twice_around_attention_and_dense_mlps():
    # 4 layers have attention, 2 of them a dense MLP; two ranks send the whole tensor once each
    activation = 16 * 2 * 8 * 2
    assert bytes_of("tp", world=2, tp=2) == 3 * 2 * (4 + 2) * activation


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("pp", {"tp": 2}),  # each tensor-parallel rank sends its part
        ("pp", {"cp": 2}),
        ("ep", {"tp": 2}),
        ("ep", {"cp": 2}),
        ("edp", {"etp": 2}),
    ],
)
def test_other_axes_divide_the_work(kind, axes):
    sizes = {"pp": 2, "ep": 4, "etp": 1}
    once = bytes_of(kind, world=64, **sizes)
    assert bytes_of(kind, world=128, **(sizes | axes)) == pytest.approx(once / 2)


def test_only_groups_with_members_and_bytes_have_traffic():
    assert set(traffic_of(ParallelLayout(world=8, pp=2, ep=4), TINY).flows) == {"pp", "ep", "dp"}
    dense = ModelSizes(**{**vars(TINY), "moe_layers": 0})
    assert set(traffic_of(ParallelLayout(world=8, pp=2, ep=2), dense).flows) == {"pp", "dp"}
    everything = ParallelLayout(world=64, tp=2, cp=2, pp=2, ep=2, etp=2)
    kinds = {"tp", "cp", "ep", "etp", "pp", "dp", "edp"}
    assert set(traffic_of(everything, TINY).flows) == kinds


def test_virtual_stages_close_the_pipeline_to_a_ring():
    layout = ParallelLayout(world=4, pp=4)
    interleaved = ModelSizes(**{**vars(TINY), "virtual_stages": 3})
    assert traffic_of(layout, TINY).flows["pp"].pattern is Pattern.CHAIN
    flow = traffic_of(layout, interleaved).flows["pp"]
    assert flow.pattern is Pattern.RING
    assert flow.bytes_per_rank == bytes_of("pp", world=4, pp=4) * 11 / 3


def test_more_moe_layers_than_layers():
    with pytest.raises(LayoutError, match="5 MoE layers of 4 layers"):
        ModelSizes(**{**vars(TINY), "moe_layers": 5})


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
