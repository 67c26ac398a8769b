"""The platform library and the files that users add to it."""

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_megatron.errors import TopologyError
from piper_megatron.platform.platform import (
    Platform,
    list_platforms,
    load_platform,
    topology_of_hosts,
)
from piper_megatron.platform.topology import NODE, Location

NAMES = """
    frontier lumi-g aurora perlmutter-a100-80 perlmutter-a100-40 alps polaris dgx-a100 dgx-h100
    dgx-h200 dgx-b200 dgx-b300 gb200-nvl72 gb300-nvl72 mi300x mi325x mi355x h800 h20 cpu-lab
""".split()


def test_the_library_is_complete():
    assert set(NAMES) == set(list_platforms())


@pytest.mark.parametrize("name", list_platforms())
def test_library_file(name):
    platform = load_platform(name)
    assert platform.name == name
    assert Platform.model_validate_json(platform.model_dump_json()) == platform
    for stated in (*platform.levels, *platform.hosts):
        assert stated.evidence in ("measured", "published", "fitted", "assumed")
        assert len(stated.source) > 10
    for setting in (*platform.environment, *platform.job_script):
        assert setting.why
        assert len(setting.source) > 10
    gbps = [level.gbps for level in platform.levels]
    assert gbps == sorted(gbps, reverse=True)  # an outer level is never faster
    nodes = [level.nodes for level in platform.levels if level.nodes]
    assert nodes == sorted(nodes)


def test_names_and_aliases_are_unique():
    platforms = [load_platform(name) for name in list_platforms()]
    names = [name for platform in platforms for name in (platform.name, *platform.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("perlmutter", "perlmutter-a100-40"),
        ("dgx-a100-80", "dgx-a100"),
        ("b200-8gpu", "dgx-b200"),
        ("lumi", "lumi-g"),
    ],
)
def test_alias(alias, name):
    assert load_platform(alias).name == name


def test_unknown_name_lists_all():
    with pytest.raises(TopologyError) as caught:
        load_platform("fronteer")
    assert "unknown platform 'fronteer', did you mean frontier" in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize(
    ("name", "seen", "paths"),
    [
        # cabinet, chassis
        ("frontier", ["x2103c4s6b1n0", "x2103c0s0b0n1"], [("x2103", "c4"), ("x2103", "c0")]),
        ("aurora", ["x4519c3s2b0n0"], [("x4519", "c3")]),
        ("alps", ["x1100c0s6b1n0"], [("x1100", "c0")]),
        # group, rack
        ("polaris", ["x3004c0s13b0n0", "x3005c0s1b1n0"], [("g0", "x3004"), ("g1", "x3005")]),
        ("polaris", ["x3212c0s37b1n0"], [("g9", "x3212")]),
        # numbered hosts: 16 nodes a chassis, 128 or 124 a group
        (
            "frontier",
            ["frontier00001", "frontier00128", "frontier00129"],
            [("0", "0"), ("0", "7"), ("1", "8")],
        ),
        ("lumi-g", ["nid005000", "nid005123", "nid005124"], [("0", "0"), ("0", "7"), ("1", "7")]),
    ],
)
def test_domains_of_host_names(name, seen, paths):
    topology = topology_of_hosts(load_platform(name), seen)
    assert [node.path for node in topology.nodes] == paths
    assert topology.notes == ()


def test_unmatched_host_is_alone_and_noted():
    topology = topology_of_hosts(load_platform("frontier"), ["frontier00001", "login2", "login3"])
    domains = topology.domains([Location(n.host, 0) for n in topology.nodes])
    names = [level.name for level in topology.levels]
    assert len(set(domains[:, names.index("group")])) == 3
    assert "2 nodes login[2-3]: no chassis or group is known" in topology.notes[0]


def test_levels_of_which_nothing_is_known_are_left_out():
    topology = topology_of_hosts(load_platform("gb200-nvl72"), ["tray1", "tray2"])
    assert [level.name for level in topology.levels] == [NODE, "machine"]
    assert topology.notes[0].startswith("no rack is known from")


def test_hosts_outside_the_numbering_do_not_match():
    topology = topology_of_hosts(load_platform("lumi-g"), ["nid005000", "nid000003"])
    assert topology.nodes[1].path == ("unknown:nid000003",) * 2
    topology = topology_of_hosts(load_platform("polaris"), ["x3001c0s1b0n0", "x3000c0s1b0n0"])
    assert "node x3000c0s1b0n0" in topology.notes[0]  # a management rack is in no group


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.sampled_from(["frontier", "lumi-g"]), st.sets(st.integers(5000, 7900), min_size=1))
def test_numbered_domains_never_exceed_their_size(name, numbers):
    platform = load_platform(name)
    form = {"frontier": "frontier{:05d}", "lumi-g": "nid{:06d}"}[name]
    hosts = [form.format(n) for n in sorted(numbers)]
    topology = topology_of_hosts(platform, hosts)
    domains = topology.domains([Location(host, 0) for host in hosts])
    for i, level in enumerate(platform.levels):
        if level.nodes:
            sizes = [list(domains[:, i]).count(d) for d in set(domains[:, i])]
            assert max(sizes) <= level.nodes


GOOD = {
    "name": "mine",
    "description": "my cluster",
    "ranks_per_node": 8,
    "levels": [
        {"name": "pair", "ranks": 2, "gbps": 200, "evidence": "measured", "source": "bench"},
        {"name": "node", "gbps": 50, "evidence": "measured", "source": "bench"},
        {"name": "leaf", "gbps": 25, "nodes": 4, "evidence": "published", "source": "vendor"},
        {"name": "machine", "gbps": 12, "evidence": "fitted", "source": "a log"},
    ],
    "hosts": [{"of": "host", "match": r"n(?P<index>\d+)", "evidence": "assumed", "source": "me"}],
    "environment": [{"name": "A", "value": "1", "why": "because", "source": "me"}],
}


def level(**change):
    return {"levels": [GOOD["levels"][0], GOOD["levels"][1] | change, *GOOD["levels"][2:]]}


def rule(**change):
    return {"hosts": [GOOD["hosts"][0] | change]}


def test_a_platform_of_the_user(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    topology = topology_of_hosts(load_platform(str(path)), ["n0", "n3", "n4"])
    assert [node.path for node in topology.nodes] == [("0",), ("0",), ("1",)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks_per_nod": 8}, "unknown key 'ranks_per_nod'; did you mean 'ranks_per_node'?"),
        (level(gpbs=5), "levels.1: unknown key 'gpbs'; did you mean 'gbps'?"),
        (level(gbps=0), "levels.1.gbps: Input should be greater than 0, got 0"),
        (level(evidence="guessed"), "levels.1.evidence"),
        (level(source=""), "levels.1.source"),
        (level(name="server"), "one called 'node', got [pair, server, leaf, machine]"),
        (level(ranks=8), "level node is not inside a node"),
        ({"ranks_per_node": 5}, "level pair: 2 ranks do not divide the 5 ranks of a node"),
        ({"description": ""}, "description"),
        (rule(match="n("), "hosts.0.match: Input should be a valid regular expression"),
        (rule(match=r"n\d+"), "gives no label for level leaf; add a group (?P<leaf>...)"),
        (rule(match="(?P<index>.*)"), r"write index as (?P<index>\d+)"),
        (rule(match=r"(?P<laef>\d+)"), "no level 'laef' between the node and the outermost; did"),
        (rule(translate={"group": {}}), "no level 'group' between"),
        (rule(of="hostname"), "hosts.0.of"),
        ({"environment": [{"name": "A B", "value": "1"}]}, "environment.0.name"),
    ],
)
def test_bad_platform_files_get_one_line(tmp_path, change, message):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(GOOD | change))
    with pytest.raises(TopologyError) as caught:
        load_platform(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_platform_is_in_the_documentation():
    text = (Path(__file__).parents[1] / "docs" / "topology.md").read_text()
    listed = re.findall(r"^\| `([a-z0-9-]+)`", text, re.MULTILINE)
    assert sorted(listed) == sorted(list_platforms())
