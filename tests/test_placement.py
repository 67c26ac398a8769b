"""Placement: a renumbering that is never worse, whole expert groups, contiguous nodes, files."""

import json
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_megatron.errors import PlacementError
from piper_megatron.layout import placement as placing
from piper_megatron.layout.crossing import bytes_by_level, communication_seconds, crossing_shares
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.placement import (
    Placement,
    logical_ranks_of_hosts,
    place,
    read_placement_file,
    write_placement_file,
)
from piper_megatron.layout.traffic import Flow, Pattern, Traffic, traffic_of
from piper_megatron.platform.topology import Level, Location, Node, Topology

LEVELS = (
    Level("pair", 200, ranks=2),
    Level("node", 50),
    Level("switch", 12.5),
    Level("group", 9),
    Level("machine", 4),
)


def cluster(*switches: int) -> Topology:
    """Switches with these numbers of nodes, two switches to a group."""
    nodes = [
        Node(f"n{s}-{i}", (f"g{s // 2}", f"s{s}"))
        for s, count in enumerate(switches)
        for i in range(count)
    ]
    return Topology("cluster", LEVELS, tuple(nodes))


def node_by_node(topology: Topology, ranks: int) -> list[Location]:
    return [Location(node.host, i) for node in topology.nodes for i in range(ranks)]


def round_robin(topology: Topology, ranks: int) -> list[Location]:
    return [Location(node.host, i) for i in range(ranks) for node in topology.nodes]


def shuffled[T](items: list[T], seed: int) -> list[T]:
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def shares(layout, topology, locations, placement) -> dict[str, dict[str, float]]:
    domains = topology.domains(locations)[placement.physical_of_logical]
    return crossing_shares(layout, topology, domains)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def jobs(draw, equal_nodes=None):
    """A layout, a topology, and launcher ranks in some order over all of its nodes."""
    if equal_nodes is None:
        equal_nodes = draw(st.booleans())
    topology = cluster(*draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)), 1)
    if equal_nodes:
        locations = node_by_node(topology, draw(st.sampled_from([1, 2, 3, 4, 8])))
    else:
        ranks = st.sampled_from([1, 2, 4, 4, 8])
        locations = [Location(n.host, i) for n in topology.nodes for i in range(draw(ranks))]
    world = len(locations)
    pp = draw(st.sampled_from(divisors(world)))
    ep = draw(st.sampled_from(divisors(world // pp)))
    tp = draw(st.sampled_from([d for d in (1, 2, 4) if world // pp % d == 0]))
    etp = draw(st.sampled_from([d for d in (1, 2) if world // pp % (ep * d) == 0]))
    cp = draw(st.sampled_from([d for d in (1, 2) if world // pp % (tp * d) == 0]))
    order = draw(st.sampled_from(["as is", "round robin", "shuffled"]))
    if order == "round robin":
        locations.sort(key=lambda location: location.local_rank)
    elif order == "shuffled":
        locations = shuffled(locations, draw(st.integers(0, 9)))
    return ParallelLayout(world=world, pp=pp, tp=tp, cp=cp, ep=ep, etp=etp), topology, locations


@settings(max_examples=200, deadline=None, derandomize=True)
@given(jobs(), st.sampled_from(placing.POLICIES))
def test_a_permutation_that_costs_no_more_than_the_launchers_order(job, policy):
    layout, topology, locations = job
    traffic = traffic_of(layout)
    placement = place(layout, topology, locations, traffic, policy)
    assert sorted(placement.logical_of_physical.tolist()) == list(range(layout.world))
    inverse = placement.logical_of_physical[placement.physical_of_logical]
    assert inverse.tolist() == list(range(layout.world))
    domains = topology.domains(locations)
    before = communication_seconds(bytes_by_level(layout, traffic, topology, domains), topology)
    after = communication_seconds(
        bytes_by_level(layout, traffic, topology, domains[placement.physical_of_logical]), topology
    )
    assert (before, after) == (placement.cost_before_s, placement.cost_after_s)
    assert after <= before


@settings(max_examples=200, deadline=None, derandomize=True)
@given(jobs(equal_nodes=True), st.sampled_from(["auto", "block"]))
def test_equal_nodes_keep_contiguous_blocks_unless_the_launchers_order_is_cheaper(job, policy):
    layout, topology, locations = job
    placement = place(layout, topology, locations, traffic_of(layout), policy)
    size = layout.world // len({location.host for location in locations})
    logical = [locations[physical] for physical in placement.physical_of_logical]
    blocks = [logical[i : i + size] for i in range(0, layout.world, size)]
    contiguous = all(block == [Location(block[0].host, i) for i in range(size)] for block in blocks)
    assert contiguous == placement.contiguous
    assert contiguous == (not placement.notes)
    assert contiguous or placement.order == placing.KEPT


def test_packed_orders_put_as_many_cells_into_a_domain_as_its_size_allows():
    """A cell is the smallest block of logical ranks that holds whole expert groups and nodes."""
    seen = 0
    random = np.random.default_rng(0)
    for _ in range(300):
        topology = cluster(*random.integers(0, 9, size=5), 2)
        size = int(random.choice([2, 4, 8]))
        nodes = len(topology.nodes)
        pp, ep = int(random.choice(divisors(nodes))), size * int(random.choice([2, 3, 4]))
        if nodes * size // pp % ep:
            continue
        layout = ParallelLayout(world=nodes * size, pp=pp, ep=ep)
        locations = shuffled(node_by_node(topology, size), int(random.integers(9)))
        placement = place(layout, topology, locations, traffic_of(layout))
        if placement.order not in (placing.PIPELINE_FIRST, placing.DATA_FIRST):
            continue
        seen += 1
        domains = topology.domains(locations)[placement.physical_of_logical]
        for of_rank in domains.T[topology.node_level :]:
            cells = of_rank.reshape(-1, ep)
            whole = int((cells == cells[:, :1]).all(axis=1).sum())
            assert whole == int((np.bincount(of_rank) // ep).sum())
    assert seen >= 20


@settings(max_examples=100, deadline=None, derandomize=True)
@given(jobs(equal_nodes=False))
def test_unequal_nodes_pack_tensor_groups_whenever_the_packed_order_wins(job):
    layout, topology, locations = job
    placement = place(layout, topology, locations, traffic_of(layout))
    if placement.order in (placing.PIPELINE_FIRST, placing.DATA_FIRST) and layout.tp > 1:
        nodes = np.bincount(topology.domains(locations)[:, topology.node_level])
        whole = 1 - shares(layout, topology, locations, placement)["tp"]["node"]
        possible = int((nodes // layout.tp).sum()) / (layout.world // layout.tp)
        assert whole == pytest.approx(possible)


@pytest.mark.parametrize("seed", range(12))
def test_close_to_the_best_of_all_orders_of_nodes(seed):
    random = np.random.default_rng(seed)
    switches = np.bincount(random.integers(0, 4, size=6), minlength=4)
    topology = cluster(*switches)
    pp, ep, tp = [(1, 8, 1), (2, 4, 1), (3, 8, 2), (2, 6, 1)][seed % 4]
    layout = ParallelLayout(world=24, pp=pp, ep=ep, tp=tp, etp=1)
    traffic = traffic_of(layout)
    locations = node_by_node(topology, 4)
    placement = place(layout, topology, shuffled(locations, seed), traffic)
    domains = topology.domains(locations).reshape(6, 4, -1)
    best = min(
        communication_seconds(
            bytes_by_level(layout, traffic, topology, domains[list(p)].reshape(24, -1)), topology
        )
        for p in permutations(range(6))
    )
    assert placement.cost_after_s <= 1.02 * best


def test_equal_bandwidths_still_keep_expert_groups_in_the_inner_level():
    """Chassis and group cost the same; the group of 4 nodes stays in a chassis all the same."""
    levels = (Level("node", 50), Level("chassis", 12), Level("group", 12), Level("machine", 6))
    nodes = tuple(Node(f"n{i}", ("g", f"c{i % 2}")) for i in range(8))
    topology = Topology("two chassis", levels, nodes)
    layout = ParallelLayout(world=16, pp=2, ep=8)
    placement = place(layout, topology, node_by_node(topology, 2), traffic_of(layout))
    assert placement.cost_after_s == placement.cost_before_s
    domains = topology.domains(node_by_node(topology, 2))[placement.physical_of_logical]
    assert crossing_shares(layout, topology, domains)["tp_ep"]["chassis"] == 0


def test_round_robin_over_two_hosts_is_repaired():
    topology = Topology("lab", (Level("node", 10), Level("machine", 0.025)), (Node("a"), Node("b")))
    layout = ParallelLayout(world=8, pp=2, ep=4)
    placement = place(layout, topology, round_robin(topology, 4), traffic_of(layout))
    assert placement.logical_of_physical.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert placement.contiguous
    assert placement.notes == ()
    assert placement.cost_after_s < placement.cost_before_s / 100


def test_thirteen_nodes_out_of_two_groups():
    topology = cluster(8, 0, 5)
    layout = ParallelLayout(world=104, pp=13, ep=8)
    locations = shuffled(node_by_node(topology, 8), 3)
    placement = place(layout, topology, locations, traffic_of(layout))
    crossing = shares(layout, topology, locations, placement)
    assert crossing["tp_ep"]["node"] == 0
    stage_of_group = [topology.domains(locations)[p, 3] for p in placement.physical_of_logical]
    assert np.count_nonzero(np.diff(stage_of_group)) == 1  # the pipeline enters a group once


def test_five_nodes_of_one_switch_and_three_of_another():
    topology = cluster(5, 3)
    layout = ParallelLayout(world=64, pp=1, ep=16)
    locations = round_robin(topology, 8)
    placement = place(layout, topology, locations, traffic_of(layout))
    assert placement.contiguous
    assert shares(layout, topology, locations, placement)["tp_ep"]["switch"] == 1 / 4


def test_packing_where_cutting_the_sorted_nodes_would_split_more():
    topology = cluster(3, 0, 4, 0, 5)
    layout = ParallelLayout(world=96, pp=1, ep=32)
    locations = node_by_node(topology, 8)
    placement = place(layout, topology, locations, traffic_of(layout))
    assert placement.order in (placing.PIPELINE_FIRST, placing.DATA_FIRST)
    assert placement.contiguous
    before = crossing_shares(layout, topology, topology.domains(locations))
    assert before["tp_ep"]["switch"] == pytest.approx(2 / 3)
    after = shares(layout, topology, locations, placement)
    assert after["tp_ep"]["switch"] == pytest.approx(1 / 3)


def test_pipeline_neighbours_share_a_switch_when_they_talk_most():
    topology = cluster(4, 4, 4, 4)
    layout = ParallelLayout(world=64, pp=4, ep=4)
    traffic = Traffic({"ep": Flow(8e9, Pattern.ALL_TO_ALL), "pp": Flow(4e9, Pattern.CHAIN)}, "")
    locations = shuffled(node_by_node(topology, 4), 1)
    placement = place(layout, topology, locations, traffic)
    crossing = shares(layout, topology, locations, placement)
    assert crossing["tp_ep"]["node"] == 0
    assert crossing["pp"]["switch"] == 0


def test_replicas_share_a_switch_when_they_talk_most():
    topology = cluster(4, 4, 4, 4)
    layout = ParallelLayout(world=64, pp=4, ep=4)
    traffic = Traffic({"pp": Flow(1e9, Pattern.CHAIN), "dp": Flow(9e9, Pattern.COLLECTIVE)}, "")
    locations = shuffled(node_by_node(topology, 4), 1)
    placement = place(layout, topology, locations, traffic)
    assert shares(layout, topology, locations, placement)["dp"]["switch"] == 0


def test_launchers_order_stays_when_it_is_cheaper_although_not_contiguous():
    topology = Topology("two", (Level("node", 10), Level("machine", 1)), (Node("a"), Node("b")))
    layout = ParallelLayout(world=4, pp=2)
    traffic = Traffic({"pp": Flow(9e9, Pattern.CHAIN), "dp": Flow(1e9, Pattern.COLLECTIVE)}, "")
    placement = place(layout, topology, round_robin(topology, 2), traffic)
    assert placement.logical_of_physical.tolist() == [0, 1, 2, 3]
    assert placement.order == placing.KEPT
    assert not placement.contiguous
    assert "flex dispatcher" in placement.notes[0]


def test_unequal_nodes_keep_expert_groups_whole_and_say_that_blocks_are_unequal():
    topology = cluster(2, 1)
    locations = [
        Location(node.host, i)
        for node, ranks in zip(topology.nodes, (8, 4, 8), strict=True)
        for i in range(ranks)
    ]
    layout = ParallelLayout(world=20, pp=5, ep=4)
    placement = place(layout, topology, shuffled(locations, 5), traffic_of(layout))
    assert shares(layout, topology, shuffled(locations, 5), placement)["tp_ep"]["node"] == 0
    assert not placement.contiguous
    assert "2 with 8, 1 with 4" in placement.notes[0]


def test_nodes_that_hold_several_stages_stay_contiguous():
    topology = cluster(2, 2)
    layout = ParallelLayout(world=32, pp=8, ep=2)
    placement = place(layout, topology, round_robin(topology, 8), traffic_of(layout))
    assert placement.contiguous
    hosts = logical_ranks_of_hosts(round_robin(topology, 8), placement)
    assert hosts["n0-0"] == list(range(8))


def test_block_is_network_order_and_none_is_the_launchers():
    topology = cluster(2, 2)
    layout = ParallelLayout(world=16, pp=2, ep=4)
    locations = round_robin(topology, 4)
    block = place(layout, topology, locations, traffic_of(layout), "block")
    assert list(logical_ranks_of_hosts(locations, block)) == [n.host for n in topology.nodes]
    assert block.order == placing.TREE
    none = place(layout, topology, locations, traffic_of(layout), "none")
    assert none.logical_of_physical.tolist() == list(range(16))


def test_equal_inputs_give_equal_placements():
    topology = cluster(3, 4, 2, 3)
    layout = ParallelLayout(world=96, pp=2, ep=16)
    locations = shuffled(node_by_node(topology, 8), 2)
    first, second = (place(layout, topology, locations, traffic_of(layout)) for _ in range(2))
    assert first.logical_of_physical.tolist() == second.logical_of_physical.tolist()


def test_unknown_policy_and_missing_locations():
    topology = cluster(2)
    layout = ParallelLayout(world=4)
    locations = node_by_node(topology, 2)
    with pytest.raises(PlacementError, match="'best' is none of auto, block, none"):
        place(layout, topology, locations, traffic_of(layout), "best")
    with pytest.raises(PlacementError, match="3 locations for a world of 4 ranks"):
        place(layout, topology, locations[:3], traffic_of(layout))


class TestFiles:
    topology = cluster(2, 1)
    layout = ParallelLayout(world=6, pp=3)
    locations = round_robin(topology, 2)

    def read(self, path) -> Placement:
        traffic = traffic_of(self.layout)
        return read_placement_file(path, self.layout, self.topology, self.locations, traffic)

    @pytest.mark.parametrize("name", ["placement.yaml", "placement.json"])
    def test_round_trip(self, tmp_path, name):
        traffic = traffic_of(self.layout)
        placement = place(self.layout, self.topology, self.locations, traffic)
        write_placement_file(tmp_path / name, self.locations, placement)
        again = self.read(tmp_path / name)
        assert again.logical_of_physical.tolist() == placement.logical_of_physical.tolist()
        assert again.cost_after_s == placement.cost_after_s
        assert again.contiguous

    def test_json_is_json(self, tmp_path):
        placement = place(self.layout, self.topology, self.locations, traffic_of(self.layout))
        write_placement_file(tmp_path / "p.json", self.locations, placement)
        content = json.loads((tmp_path / "p.json").read_text())
        assert content == {"n0-0": [0, 1], "n0-1": [2, 3], "n1-0": [4, 5]}

    def test_a_file_is_obeyed_whatever_it_costs(self, tmp_path):
        (tmp_path / "p.yaml").write_text("n0-0: [4, 0]\nn0-1: [1, 5]\nn1-0: [2, 3]\n")
        placement = self.read(tmp_path / "p.yaml")
        assert placement.logical_of_physical.tolist() == [4, 1, 2, 0, 5, 3]
        assert not placement.contiguous
        assert "does not number each node's ranks" in placement.notes[0]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("n0-0: [0, 1]\nn0-1: [2, 3]\nn9: [4, 5]\n", "host n9 is not in the job"),
            ("n0-0: [0, 1]\nn0-1: [2, 3]\n", "host n1-0 of the job is missing"),
            ("n0-0: [0, 1]\nn0-1: [2, 3]\nn1-0: [4]\n", "host n1-0 has 1 ranks, .* runs 2"),
            ("n0-0: [0, 1]\nn0-1: [2, 3]\nn1-0: [4, 6]\n", r"rank 6 of host n1-0 .*0\.\.5"),
            ("n0-0: [0, 1]\nn0-1: [2, 3]\nn1-0: [4, 1]\n", "rank 1 .* n0-0 and to host n1-0"),
            ("n0-0: [0, 1]\nn0-1: [2, 3]\nn1-0: [4, x]\n", "host n1-0 needs a list of whole"),
            ("n0-0: [0, 1]\nn0-1: [2, 3]\nn1-0: [4, true]\n", "host n1-0 needs a list of whole"),
            ("n0-0: 3\n", "host n0-0 needs a list of whole numbers, got 3"),
            ("[0, 1, 2]\n", "must map each host"),
            ("", "must map each host"),
            ("n0-0: [0, 1\n", "neither YAML nor JSON"),
        ],
    )
    def test_bad_files(self, tmp_path, text, message):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(PlacementError, match=message) as error:
            self.read(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)

    def test_no_such_file(self, tmp_path):
        with pytest.raises(PlacementError, match="none of auto, block, none and no readable file"):
            self.read(tmp_path / "absent.yaml")
        placement = place(self.layout, self.topology, self.locations, traffic_of(self.layout))
        with pytest.raises(PlacementError, match="cannot write placement"):
            write_placement_file(tmp_path / "absent" / "p.yaml", self.locations, placement)
