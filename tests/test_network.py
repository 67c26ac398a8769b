"""Prices of collectives: arithmetic by hand, published measurements, and what must never happen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import platform, transfer

from piper_megatron.layout.collectives import Collective, Operation
from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.network import (
    all_to_all_cost,
    collective_cost,
    message_cost,
    neighbours_cost,
)
from piper_megatron.resources.reach import Reach

GB = 1e9


def price(operation: Operation, tensor_bytes: float, group: Reach, where=None):
    collective = Collective("any", "tp", operation, tensor_bytes, "forward")
    return collective_cost(where or platform(), group, collective)


def test_a_ring_inside_a_node_sends_its_share_at_the_nodes_rate():
    node = Reach(8, (1, 1))
    for operation, sent in [
        (Operation.ALL_GATHER, 7 / 8),
        (Operation.REDUCE_SCATTER, 7 / 8),
        (Operation.ALL_REDUCE, 2 * 7 / 8),
    ]:
        cost = price(operation, 8 * GB, node)
        assert float(cost.seconds) == pytest.approx(8 * sent / 50)
        assert [float(b) for b in cost.bytes_by_level] == pytest.approx([8 * GB * sent, 0])


def test_members_of_a_node_share_a_rings_traffic_among_their_nics():
    """Eight NICs of 12.5 carry what one rank passes on; one rank a node has its own alone."""
    whole_nodes = price(Operation.ALL_GATHER, 32 * GB, Reach(32, (4, 1)))
    assert float(whole_nodes.bytes_by_level[1]) == pytest.approx(31 * GB / 8)
    assert float(whole_nodes.seconds) == pytest.approx(31 / 50)  # 8 x 12.5 outrun the node's links
    one_a_node = price(Operation.ALL_GATHER, 4 * GB, Reach(4, (4, 1)))
    assert float(one_a_node.seconds) == pytest.approx(3 / 12.5)


def test_what_leaves_a_node_flows_beside_what_stays():
    cost = price(Operation.ALL_TO_ALL, 32 * GB, Reach(32, (4, 1)))
    assert [float(b) for b in cost.bytes_by_level] == pytest.approx([7 * GB, 24 * GB])
    assert float(cost.seconds) == pytest.approx(24 / 12.5)


def test_taper_counts_for_what_crosses_it():
    frontier = load_platform("frontier")
    names = [level.name for level in frontier.levels]
    domains = dict(zip(names, (4, 1, 1, 1, 1), strict=True)) | {"pair": 4}

    def across(chassis: int, group: int) -> float:
        spread = domains | {"node": 4, "chassis": chassis, "group": group}
        reach = Reach(4, tuple(spread[name] for name in names))
        return float(message_cost(frontier, reach, 1 * GB).seconds)

    assert across(1, 1) == pytest.approx(across(4, 1), rel=0.01)
    assert across(4, 4) > 1.5 * across(4, 1)


def test_startup_steps_and_messages():
    slow = platform(
        inside=transfer(startup_s=1.0, latency_s=0.1),
        between=transfer(startup_s=10.0, latency_s=1.0),
    )
    nothing = 1e-3
    node, four = Reach(8, (1, 1)), Reach(32, (4, 1))
    assert float(price(Operation.ALL_GATHER, nothing, node, slow).seconds) == pytest.approx(1.7)
    assert float(price(Operation.ALL_REDUCE, nothing, node, slow).seconds) == pytest.approx(2.4)
    ring = 10 + (31 / 32) * (28 * 0.1 + 4 * 1)
    assert float(price(Operation.ALL_GATHER, nothing, four, slow).seconds) == pytest.approx(ring)
    tree = 10 + 2 * (31 / 32) * 28 * 0.1 + 2 * 2
    assert float(price(Operation.ALL_REDUCE, nothing, four, slow).seconds) == pytest.approx(tree)
    flat = price(Operation.ALL_TO_ALL, nothing, four, slow)
    assert float(flat.seconds) == pytest.approx(10 + 24)
    assert float(flat.messages) == 31


def test_short_messages_reach_half_and_two_thirds_of_the_rate():
    curve = platform(inside=transfer(ramp_bytes=1e6))
    node = Reach(2, (1, 1))
    for sent, share in [(1, 1 / 2), (1e6, 2 / 3), (1e12, 1)]:
        cost = all_to_all_cost(curve, node, sent)
        assert sent / float(cost.seconds) / 50e9 == pytest.approx(share, rel=1e-5)


def test_meshes_give_small_groups_their_links_alone():
    mesh = platform(node_gbps=70, inside=transfer(mesh=True))
    for members, gbps in [(2, 10), (4, 30), (8, 70)]:
        cost = all_to_all_cost(mesh, Reach(members, (1, 1)), 1 * GB)
        assert float(cost.seconds) == pytest.approx(1 / gbps)


def test_neighbours_wait_for_the_pair_with_the_slowest_link():
    ring = neighbours_cost(platform(), Reach(4, (2, 1)), 3 * GB)
    assert float(ring.seconds) == pytest.approx(3 / 12.5)
    assert [float(b) for b in ring.bytes_by_level] == pytest.approx([1.5 * GB, 1.5 * GB])
    assert float(neighbours_cost(platform(), Reach(4, (1, 1)), 3 * GB).seconds) == pytest.approx(
        3 / 50
    )


def test_a_message_costs_the_mean_over_boundaries():
    pipeline = Reach(4, (2, 1))  # two stages a node: two boundaries of three stay inside
    seconds = float(message_cost(platform(), pipeline, 1 * GB).seconds)
    assert seconds == pytest.approx(2 / 3 / 50 + 1 / 3 / 12.5)


# seconds, from the tables of ai-dynamo/aiconfigurator (095f58a5, 2026-08-21), NCCL 2.27 and 2.29
NCCL = [
    ("dgx-a100", Operation.ALL_TO_ALL, 8, 64 << 20, 347.6e-6),
    ("dgx-a100", Operation.ALL_GATHER, 8, 256 << 20, 1216.8e-6),
    ("dgx-a100", Operation.ALL_REDUCE, 4, 64 << 20, 544.8e-6),
    ("dgx-h100", Operation.ALL_TO_ALL, 8, 64 << 20, 221.3e-6),
    ("dgx-h100", Operation.ALL_TO_ALL, 2, 256 << 20, 494.7e-6),
    ("dgx-h100", Operation.ALL_GATHER, 8, 16 << 20, 68.9e-6),
    ("dgx-h100", Operation.REDUCE_SCATTER, 8, 256 << 20, 721.7e-6),
    ("dgx-h100", Operation.REDUCE_SCATTER, 2, 64 << 20, 169.1e-6),
    ("dgx-h100", Operation.ALL_REDUCE, 8, 64 << 20, 324.5e-6),
    ("dgx-b200", Operation.ALL_TO_ALL, 8, 256 << 20, 437.7e-6),
    ("dgx-b200", Operation.ALL_GATHER, 8, 256 << 20, 393.1e-6),
    ("dgx-b200", Operation.REDUCE_SCATTER, 4, 256 << 20, 380.5e-6),
    ("gb200-nvl72", Operation.ALL_TO_ALL, 4, 256 << 20, 428.0e-6),
    ("gb200-nvl72", Operation.ALL_GATHER, 4, 64 << 20, 108.3e-6),
]


@pytest.mark.parametrize(("name", "operation", "members", "size", "seconds"), NCCL)
def test_measured_collectives_inside_a_node(name, operation, members, size, seconds):
    where = load_platform(name)
    group = Reach(members, (1,) * len(where.levels))
    assert float(price(operation, size, group, where).seconds) == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("nodes", "size", "busbw"), [(2, 1 << 33, (42, 52)), (8, 1 << 33, (42, 52))]
)
def test_flat_all_to_all_between_nodes_runs_at_the_rate_of_a_nic(nodes, size, busbw):
    """48 to 49 of 50 GB/s, NVIDIA/nccl-tests issue 267; 45 at least, ROCm/cvs (dddd9143)."""
    where = load_platform("dgx-h100")
    cost = price(Operation.ALL_TO_ALL, size, Reach(8 * nodes, (nodes, 1)), where)
    rate = float(cost.bytes_by_level[1]) / float(cost.seconds) / GB
    assert busbw[0] < rate < busbw[1]


def test_rings_over_whole_nodes_use_all_nics():
    """330 to 360 GB/s on 2 nodes of 8 x 50, ROCm/cvs rccl_config.json (dddd9143)."""
    where = load_platform("mi300x")
    for operation in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER):
        size = 8 << 30
        seconds = float(price(operation, size, Reach(16, (2, 1)), where).seconds)
        assert 250 < size * 15 / 16 / seconds / GB < 370


groups = st.sampled_from([(2, 1), (8, 1), (16, 2), (64, 8), (64, 64), (1024, 128)])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.sampled_from(["dgx-h100", "mi355x", "perlmutter-a100-80"]),
    st.sampled_from(list(Operation)),
    groups,
    st.floats(1, 1e10),
)
def test_more_bytes_take_longer_and_never_less_than_the_links_allow(name, operation, group, size):
    where = load_platform(name)
    members, nodes = group
    if members // nodes > where.ranks_per_node:
        return
    inner = [nodes] * (where.node_level + 1)
    reach = Reach(members, (*inner, *[1] * (len(where.levels) - len(inner))))
    cost = price(operation, size, reach, where)
    longer = price(operation, 1.5 * size, reach, where)
    assert 0 < float(cost.seconds) < float(longer.seconds)
    for level, sent in zip(where.levels, cost.bytes_by_level, strict=True):
        assert float(sent) / (level.gbps * 1e9) <= float(cost.seconds)
    sent = Collective("any", "tp", operation, size, "forward").sent_bytes(members)
    assert sum(map(float, cost.bytes_by_level)) == pytest.approx(float(sent))


@pytest.mark.parametrize("operation", Operation)
def test_groups_of_one_cost_nothing_and_arrays_equal_single_groups(operation):
    where = load_platform("dgx-h100")
    assert float(price(operation, 1e9, Reach(1, (1, 1)), where).seconds) == 0
    members, nodes = np.array([1, 4, 8, 16, 128]), np.array([1, 1, 1, 2, 16])
    together = price(operation, 1e8, Reach(members, (nodes, np.ones(5, int))), where)
    for i, (n, m) in enumerate(zip(members.tolist(), nodes.tolist(), strict=True)):
        alone = price(operation, 1e8, Reach(n, (m, 1)), where)
        assert float(alone.seconds) == pytest.approx(float(together.seconds[i]))
