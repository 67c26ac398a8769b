"""The data model, topology files, and the node sets in them."""

import re
import string
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_megatron.errors import TopologyError
from piper_megatron.platform.topology import Level, Location, Node, Topology
from piper_megatron.platform.topology_file import read_topology, write_topology

LEVELS = (
    Level("pair", 200, ranks=2),
    Level("node", 50),
    Level("switch", 25),
    Level("group", 12.5),
    Level("machine", 6),
)


def two_groups() -> Topology:
    paths = {"a": ("g0", "s0"), "b": ("g0", "s0"), "c": ("g0", "s1"), "d": ("g1", "s0")}
    return Topology("t", LEVELS, tuple(Node(host, path) for host, path in paths.items()))


def test_ranks_meet_at_the_innermost_common_domain():
    where = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("d", 0)]
    domains = two_groups().domains([Location(*w) for w in where])
    meet = [int(np.argmax(domains[0] == domains[i])) for i in range(1, len(where))]
    assert [LEVELS[m].name for m in meet] == ["pair", "node", "switch", "group", "machine"]


def test_a_label_names_a_domain_only_inside_its_parent():
    domains = two_groups().domains([Location("a", 0), Location("d", 0)])
    assert domains[0, 2] != domains[1, 2]  # both are called s0


@st.composite
def jobs(draw):
    """A topology of two to four levels above the node, and devices of it."""
    depth = draw(st.integers(0, 3))
    pair = draw(st.booleans())
    names = draw(st.lists(host_names, min_size=1, max_size=12, unique=True))
    label = st.integers(0, 2).map(lambda i: f"d{i}")
    nodes = tuple(Node(n, tuple(draw(label) for _ in range(depth))) for n in names)
    levels = (
        *([Level("pair", 100, ranks=2)] if pair else []),
        Level("node", 50, evidence="measured", source="by hand: on a Monday"),
        *(Level(f"level{i}", 25 / (i + 1)) for i in range(depth)),
        Level("machine", 5),
    )
    notes = tuple(draw(st.lists(st.text(string.printable, max_size=20), max_size=2)))
    topology = Topology(draw(st.text(string.ascii_letters, min_size=1)), levels, nodes, notes)
    devices = st.builds(Location, st.sampled_from(names), st.integers(0, 7))
    return topology, draw(st.lists(devices, max_size=30, unique=True))


host_names = st.from_regex(r"[a-z]{1,3}([0-9]{1,4})?(-[a-z0-9]{1,3})?", fullmatch=True)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(jobs())
def test_domains_are_dense_and_nested(job):
    topology, locations = job
    domains = topology.domains(locations)
    assert domains.shape == (len(locations), len(topology.levels))
    assert domains.dtype == np.int64
    for level in range(len(topology.levels)):
        assert set(domains[:, level]) == set(range(len(set(domains[:, level]))))
    for inner, outer in zip(domains.T, domains.T[1:], strict=False):
        assert len(set(zip(inner, outer, strict=True))) == len(set(inner))
    if locations:
        assert set(domains[:, -1]) == {0}


@settings(derandomize=True, deadline=None, max_examples=50)
@given(jobs())
def test_what_is_written_is_read_back(tmp_path_factory, job):
    path = tmp_path_factory.mktemp("topology") / "t.yaml"
    write_topology(job[0], path)
    assert read_topology(path) == job[0]


def test_a_large_topology_is_written_as_node_sets(tmp_path):
    nodes = tuple(Node(f"n{i:04d}", (f"s{i // 16}",)) for i in range(1024))
    levels = (Level("node", 50), Level("switch", 25), Level("machine", 12))
    write_topology(Topology("big", levels, nodes), tmp_path / "t.yaml")
    text = (tmp_path / "t.yaml").read_text()
    assert "hosts: 'n[0016-0031]'" in text or "hosts: n[0016-0031]" in text
    assert len(text.splitlines()) < 100
    assert read_topology(tmp_path / "t.yaml").nodes == nodes


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ((Level("machine", 5),), "one called 'node'"),
        ((), "one called 'node'"),
        ((Level("node", 5), Level("node", 4)), "distinct names"),
        ((Level("node", 0), Level("machine", 5)), "level node needs gbps above 0, got 0"),
        ((Level("pair", 5), Level("node", 5)), "level pair inside the node needs 'ranks'"),
        ((Level("a", 5, 2), Level("b", 5, 3), Level("node", 5)), "a multiple of 2, got 3"),
        ((Level("node", 5), Level("rack", 5, 72), Level("machine", 5)), "remove its 'ranks'"),
    ],
)
def test_levels_that_contradict_each_other(levels, message):
    with pytest.raises(TopologyError, match=re.escape(message)):
        Topology("t", levels, ())


def test_two_nodes_need_a_level_that_holds_both():
    assert Topology("one", (Level("node", 5),), (Node("a"),)).domains([Location("a", 0)]).size
    with pytest.raises(TopologyError, match="2 nodes need a level above 'node'"):
        Topology("two", (Level("node", 5),), (Node("a"), Node("b")))


def test_node_with_too_few_labels_and_node_listed_twice():
    with pytest.raises(TopologyError, match=r"b needs one label for each of \[group, switch\]"):
        Topology("t", LEVELS, (Node("b", ("g0",)),))
    with pytest.raises(TopologyError, match="node a is listed twice"):
        replace(two_groups(), nodes=(Node("a", ("g", "s")), Node("a", ("g", "s"))))


def test_unlisted_node_is_named():
    with pytest.raises(TopologyError, match=r"does not list node x \(nor 1 more\)"):
        two_groups().domains([Location("y", 0), Location("a", 0), Location("x", 0)])


def test_device_claimed_twice_is_named():
    locations = [Location("a", 0), Location("b", 3), Location("a", 1), Location("b", 3)]
    with pytest.raises(TopologyError, match=r"node b reports twice.*local rank 3"):
        two_groups().domains(locations)


GOOD = """
name: mycluster
levels:
  - {name: node, gbps: 50}
  - {name: switch, gbps: 25}
  - {name: machine, gbps: 12.5}
nodes:
  - {hosts: "n[001-016]", switch: s0}
  - {hosts: "n[017-032],login1", switch: 1}
"""


def test_reads_the_documented_file(tmp_path):
    (tmp_path / "t.yaml").write_text(GOOD)
    topology = read_topology(tmp_path / "t.yaml")
    assert [level.name for level in topology.levels] == ["node", "switch", "machine"]
    assert len(topology.nodes) == 33
    assert topology.nodes[0] == Node("n001", ("s0",))
    assert Node("login1", ("1",)) in topology.nodes


def test_levels_of_a_platform(tmp_path):
    (tmp_path / "t.yaml").write_text(
        "name: part\nplatform: frontier\nnodes:\n  - {hosts: 'f[1-2]', chassis: c0, group: x1}\n"
    )
    topology = read_topology(tmp_path / "t.yaml")
    assert [level.name for level in topology.levels][-3:] == ["chassis", "group", "machine"]
    assert topology.nodes[1] == Node("f2", ("x1", "c0"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodse": []}, "unknown key 'nodse'; did you mean 'nodes'?"),
        ({"levels": [{"name": "node", "gbsp": 5}]}, "levels.0: unknown key 'gbsp'; did you mean"),
        ({"levels": [{"name": "node", "gbps": 0}]}, "levels.0.gbps: Input should be greater"),
        ({"levels": [{"name": "node", "gbps": -5.5}]}, "got -5.5"),
        ({"levels": [{"name": "node", "gbps": float("nan")}]}, "levels.0.gbps"),
        ({"levels": [{"name": "p", "gbps": 5, "ranks": 0}]}, "levels.0.ranks"),
        ({"levels": [{"name": "node"}]}, "levels.0.gbps: Field required"),
        ({"levels": [{"name": "machine", "gbps": 5}]}, "one called 'node'"),
        ({"levels": None}, "give either 'levels' or 'platform'"),
        ({"platform": "frontier"}, "give either 'levels' or 'platform'"),
        ({"levels": None, "platform": "frontierr"}, "did you mean frontier"),
        ({"nodes": None}, "nodes"),
        ({"nodes": [{"switch": "s0"}]}, "nodes.0 needs 'hosts'"),
        ({"nodes": [{"hosts": "a"}]}, "nodes.0 (a) needs a label for switch"),
        ({"nodes": [{"hosts": "a", "switch": True}]}, "nodes.0 (a) needs a label for switch"),
        ({"nodes": [{"hosts": "a", "swich": "s"}]}, "unknown key 'swich'; did you mean 'switch'?"),
        ({"nodes": [{"hosts": "a[1-", "switch": "s"}]}, "'a[1-' is not a node set"),
        (
            {"nodes": [{"hosts": "a[1-9]", "switch": "s"}, {"hosts": "a7", "switch": "r"}]},
            "node a7 is listed twice",
        ),
    ],
)
def test_bad_files_get_one_line_that_names_the_file(tmp_path, change, message):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(GOOD) | change))
    with pytest.raises(TopologyError) as caught:
        read_topology(path)
    text = str(caught.value)
    assert message in text
    assert str(path) in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "not valid YAML"),
        (b"- a\n- b\n", "valid dictionary"),
        (b"", "name: Field required"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_files_that_are_no_topology(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(TopologyError) as caught:
        read_topology(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(TopologyError, match=r"cannot read .*none\.yaml: No such file"):
        read_topology(tmp_path / "none.yaml")
