"""The grid map as a user reads it."""

import re

import numpy as np
import pytest

from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.placement import place, read_placement_file
from piper_megatron.layout.traffic import traffic_of
from piper_megatron.platform.topology import Level, Location, Node, Topology
from piper_megatron.report.grid_map import grid_map_json, render_grid_map
from piper_megatron.report.network import render_topology
from piper_megatron.report.text import count, fold, percent, seconds

LAB = Topology(
    "lab",
    (Level("node", 10, evidence="measured"), Level("machine", 2.5)),
    (Node("host-a"), Node("host-b")),
    notes=("two hosts",),
)
LAB_RANKS = [Location(f"host-{'ab'[i % 2]}", i // 2) for i in range(8)]
LAB_MAP = """\
Piper grid 2x4 (PP x EP): 8 ranks on 2 nodes, topology lab
DP 4, EDP 1, TP 1, CP 1, ETP 1

node    ranks  devices by local rank: pp.dp.ep.tp
-------------------------------------------------
host-a  0-3    0.0.0.0  0.1.1.0  0.2.2.0  0.3.3.0
host-b  4-7    1.0.0.0  1.1.1.0  1.2.2.0  1.3.3.0

Groups that leave a domain of each level, launcher's order -> this placement:

groups         number x size        node
----------------------------------------
expert (EP)            2 x 4  100% -> 0%
pipeline (PP)          4 x 2  0% -> 100%
data (DP)              2 x 4  100% -> 0%

order  nodes in network order
cost   188 s -> 63.2 s (2.97 times less): communication of a rank per step,
       without overlap
model  Qwen3-235B-A22B, 16 micro-batches of one 4096-token sequence
GB/s   node 10 (measured), machine 2.5 (assumed); of each rank, to peers that it
       meets there
note   two hosts"""


def draw(layout, topology, locations, policy="auto", **options) -> str:
    placement = place(layout, topology, locations, traffic_of(layout), policy)
    return render_grid_map(layout, topology, locations, placement, **options)


def dragonfly(nodes: int) -> Topology:
    levels = (
        Level("pair", 200, ranks=2),
        Level("node", 50),
        Level("chassis", 12.5),
        Level("group", 12.5),
        Level("machine", 7.1),
    )
    places = [Node(f"frontier{i:05d}", (f"g{i // 128}", f"c{i // 16}")) for i in range(nodes)]
    return Topology("dragonfly", levels, tuple(places))


def all_ranks(topology: Topology, ranks: int = 8) -> list[Location]:
    return [Location(node.host, i) for node in topology.nodes for i in range(ranks)]


def rows_of(text: str) -> dict[str, list[str]]:
    """Node -> device cells, with the lines of a node joined."""
    rows: dict[str, list[str]] = {}
    host = ""
    for line in text.split("\n\n")[1].splitlines()[2:]:
        host = line.split()[0] if not line.startswith(" ") else host
        rows.setdefault(host, []).extend(re.findall(r"\d+(?:\.\d+){3,}", line))
    return rows


def test_the_whole_map_of_a_small_job():
    assert draw(ParallelLayout(world=8, pp=2, ep=4), LAB, LAB_RANKS, width=80) == LAB_MAP


def test_without_a_change_only_one_value_is_shown():
    text = draw(ParallelLayout(world=8, pp=2, ep=4), LAB, LAB_RANKS, policy="none")
    assert re.search(r"expert \(EP\) +2 x 4 +100%$", text, re.MULTILINE)
    assert "->" not in text.replace("launcher's order -> this placement", "")
    assert "note   this order does not number each node's ranks one after another" in text


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize(
    "axes", [{"pp": 4, "ep": 8}, {"pp": 2, "ep": 4, "tp": 2, "cp": 2}, {"pp": 1, "ep": 128}]
)
def test_every_device_shows_its_own_coordinates_within_the_width(width, axes):
    topology = dragonfly(16)
    layout = ParallelLayout(world=128, **axes)
    locations = [all_ranks(topology)[i] for i in np.random.default_rng(0).permutation(128)]
    placement = place(layout, topology, locations, traffic_of(layout))
    text = render_grid_map(layout, topology, locations, placement, width=width)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= width
    at = layout.coordinates()
    axes = ["pp", "dp", "cp", "ep", "tp"] if layout.cp > 1 else ["pp", "dp", "ep", "tp"]
    assert f"devices by local rank: {'.'.join(axes)}" in text
    rows = rows_of(text)
    assert len(rows) == 16
    for physical, location in enumerate(locations):
        logical = placement.logical_of_physical[physical]
        shown = rows[location.host][location.local_rank]
        assert shown == ".".join(str(at[axis][logical]) for axis in axes)


def test_large_jobs_are_elided_in_the_middle():
    topology = dragonfly(200)
    layout = ParallelLayout(world=1600, pp=8, ep=8)
    text = draw(layout, topology, all_ranks(topology))
    rows = rows_of(text)
    assert len(rows) == 12 + 1 + 4
    assert "184 more nodes (piper-megatron topology --all-nodes)" in text
    assert {"frontier00000", "frontier00011", "frontier00196", "frontier00199"} < set(rows)
    everything = draw(layout, topology, all_ranks(topology), all_nodes=True)
    assert len(rows_of(everything)) == 200
    assert "more nodes" not in everything


def test_a_single_rank_has_a_map_too():
    topology = Topology("one", (Level("node", 10),), (Node("here"),))
    text = draw(ParallelLayout(world=1), topology, [Location("here", 0)])
    assert rows_of(text) == {"here": ["0.0.0.0"]}
    assert "1 rank on 1 node," in text
    assert "Groups" not in text


def test_a_placement_file_may_cost_more(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("host-a: [0, 2, 4, 6]\nhost-b: [1, 3, 5, 7]\n")
    layout = ParallelLayout(world=8, pp=2, ep=4)
    locations = all_ranks(LAB, 4)
    placement = read_placement_file(file, layout, LAB, locations, traffic_of(layout))
    text = render_grid_map(layout, LAB, locations, placement)
    assert "order  placement file" in text
    assert "63.2 s -> 188 s (2.97 times more)" in text


def test_unequal_nodes():
    topology = dragonfly(2)
    locations = all_ranks(topology)[:-4]
    text = draw(ParallelLayout(world=12, pp=3, ep=4), topology, locations, width=80)
    assert [len(row) for row in rows_of(text).values()] == [8, 4]
    assert "nodes hold unequal numbers of ranks (1 with 8, 1 with 4)" in text


def test_json_holds_what_the_map_shows():
    layout = ParallelLayout(world=8, pp=2, ep=4)
    placement = place(layout, LAB, LAB_RANKS, traffic_of(layout))
    content = grid_map_json(layout, LAB, LAB_RANKS, placement)
    assert content["layout"] == {
        "world": 8, "tp": 1, "cp": 1, "pp": 2, "ep": 4, "etp": 1, "dp": 4, "edp": 1,
    }  # fmt: skip
    assert content["placement"]["hosts"] == {"host-a": [0, 1, 2, 3], "host-b": [4, 5, 6, 7]}
    assert content["crossing"]["before"]["tp_ep"] == {"node": 1.0}
    assert content["crossing"]["after"]["tp_ep"] == {"node": 0.0}
    assert content["cost"]["after_s"] == placement.cost_after_s


def test_network_tree():
    text = render_topology(dragonfly(20), width=80)
    assert text.splitlines()[-4:] == [
        "machine: 20 nodes",
        "  group g0: 20 nodes",
        "    chassis c0: frontier[00000-00015]",
        "    chassis c1: frontier[00016-00019]",
    ]
    assert render_topology(LAB).splitlines()[-3:] == [
        "machine: host-a,host-b",
        "",
        "note  two hosts",
    ]
    assert "more domains (--all-nodes shows them)" in render_topology(dragonfly(2000))
    assert "more domains" not in render_topology(dragonfly(2000), all_nodes=True)


def test_short_forms():
    assert [percent(x) for x in (0, 0.001, 0.125, 0.5, 0.9999, 1)] == [
        "0%", "<1%", "12%", "50%", ">99%", "100%",
    ]  # fmt: skip
    assert [seconds(x) for x in (0.0123, 0.5, 2, 12.34, 16723)] == [
        "12.3 ms", "0.5 s", "2 s", "12.3 s", "16,700 s",
    ]  # fmt: skip
    assert fold([3, 0, 1, 2]) == "0-3"
    assert fold(range(0, 64, 8)) == "0-56/8"
    assert (count(1, "node"), count(9408, "node")) == ("1 node", "9,408 nodes")
