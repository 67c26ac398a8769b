"""From what a job sees to a topology: Slurm's tree and block plugins, xnames, files, platforms."""

import random
import re
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_megatron.errors import TopologyError
from piper_megatron.platform import observation
from piper_megatron.platform.discovery import (
    JobObservation,
    NodeObservation,
    observe_job,
    observe_node,
    resolve_topology,
)
from piper_megatron.platform.slurm import parse_address, topology_paths
from piper_megatron.platform.topology import Location, Topology

# two leaf switches under one spine, as `scontrol show topology` prints them
TREE = """\
SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=gpu[001-004]
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[005-008]
SwitchName=spine0 Level=1 LinkSpeed=1 Nodes=gpu[001-008] Switches=leaf[0-1]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=gpu[009-012]
SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=gpu[009-012] Switches=leaf2
SwitchName=core Level=2 LinkSpeed=1 Nodes=gpu[001-012] Switches=spine[0-1]
"""
BLOCKS = """\
BlockName=rack0 BlockIndex=0 Nodes=tray[01-18] BlockSize=18
BlockName=rack1 BlockIndex=1 Nodes=tray[19-36] BlockSize=18
BlockName=rack2 BlockIndex=2 Nodes=tray[37-54] BlockSize=18
BlockName=rack3 BlockIndex=3 Nodes=tray[55-72] BlockSize=18
AggregatedBlock=rack[0-1] BlockIndex=4 Nodes=tray[01-36] BlockSize=36
AggregatedBlock=rack[2-3] BlockIndex=5 Nodes=tray[37-72] BlockSize=36
"""
NO_JOB = JobObservation()


def on(address: str, pattern: str, host: str | None = None) -> NodeObservation:
    node = address.rpartition(".")[2]
    return NodeObservation(
        host=host or node, slurm_node=node, slurm_address=address, slurm_pattern=pattern
    )


def names(topology: Topology) -> list[str]:
    return [level.name for level in topology.levels]


def paths(topology: Topology) -> dict[str, tuple[str, ...]]:
    return {node.host: node.path for node in topology.nodes}


# --- Slurm addresses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "pattern", "word", "path"),
    [
        ("root_switch.CELL1.iswi1.belenos386", "switch.switch.switch.node", "switch", 3),
        ("core.s[0-1].n5", "switch.switch.node", "switch", ("core", "s[0-1]")),
        ("0.n5", "block.node", "block", ("0",)),
        ("b3.n5.cluster.org", "block.node", "block", ("b3",)),  # dots in the node's name
        ("r0:3.n5", "ring:position.node", "ring", ("r0",)),
        ("pod1:1:0:2.n5", "torus:x:y:z.node", "torus", ("pod1",)),
        ("core..leaf0.n5", "switch.switch.switch.node", "switch", ("core", "leaf0", "leaf0")),
    ],
)
def test_addresses(address, pattern, word, path):
    parsed = parse_address(address, pattern)
    assert parsed.word == word
    assert len(parsed.path) == path if isinstance(path, int) else parsed.path == path


@pytest.mark.parametrize(
    ("address", "pattern"),
    [
        (None, None),
        ("n5", "node"),  # flat plugin, or a node in no block
        ("..n5", "switch.switch.node"),  # a node below no switch
        ("leaf0.n5", "switch.switch.node"),
        ("leaf0.n5", None),
        ("", ""),
    ],
)
def test_addresses_that_say_nothing(address, pattern):
    assert parse_address(address, pattern) is None


def test_auto_takes_switches_from_addresses():
    nodes = [
        on(f"core.spine{i // 4}.leaf{i // 2}.n{i}", "switch.switch.switch.node") for i in range(8)
    ]
    topology = resolve_topology("auto", nodes, NO_JOB)
    # the core holds the whole job and is the machine
    assert names(topology) == ["node", "switch", "switch2", "machine"]
    assert paths(topology)["n5"] == ("spine1", "leaf2")
    gbps = [level.gbps for level in topology.levels]
    assert gbps == sorted(gbps, reverse=True)
    assert all(level.evidence == "assumed" for level in topology.levels)
    assert "bandwidths are assumed; name a platform or give a topology file" in topology.notes
    assert "domains of nodes from SLURM_TOPOLOGY_ADDR" in topology.notes


def test_a_job_inside_one_switch_keeps_that_switch():
    nodes = [on(f"core.spine0.leaf3.n{i}", "switch.switch.switch.node") for i in range(4)]
    topology = resolve_topology("auto", nodes, NO_JOB)
    assert names(topology) == ["node", "switch", "machine"]
    assert set(paths(topology).values()) == {("leaf3",)}


def test_a_block_named_zero_is_a_block():
    nodes = [on(f"{i // 2}.n{i}", "block.node") for i in range(4)]
    topology = resolve_topology("auto", nodes, NO_JOB)
    assert names(topology) == ["node", "block", "machine"]
    assert paths(topology) == {"n0": ("0",), "n1": ("0",), "n2": ("1",), "n3": ("1",)}


def test_nodes_without_address_share_no_domain():
    nodes = [on(f"b{i // 2}.n{i}", "block.node") for i in range(4)]
    nodes += [on("n4", "node"), NodeObservation(host="n5")]
    topology = resolve_topology("auto", nodes, NO_JOB)
    domains = topology.domains([Location(node.host, 0) for node in topology.nodes])
    assert len(set(domains[:, names(topology).index("block")])) == 4
    assert any("2 nodes n[4-5]: no block is known" in note for note in topology.notes)


def test_an_address_of_another_depth_is_a_mistake():
    nodes = [on(f"core.leaf{i // 2}.n{i}", "switch.switch.node") for i in range(4)]
    nodes.append(on("leaf1.n4", "switch.node"))
    topology = resolve_topology("auto", nodes, NO_JOB)
    assert names(topology) == ["node", "switch", "machine"]
    assert paths(topology)["n4"] == ("unknown:n4",)


def test_an_environment_copied_to_other_hosts_is_ignored():
    nodes = [on("core.leaf0.n0", "switch.switch.node", host=f"n{i}") for i in range(3)]
    topology = resolve_topology("auto", nodes, JobObservation(slurm_topology=TREE))
    assert "2 nodes n[1-2]: Slurm's variables are copies" in topology.notes[0]
    assert len(set(paths(topology).values())) == 3


# --- scontrol show topology -----------------------------------------------------------------------


def test_auto_takes_switches_from_scontrol():
    hosts = ["gpu001", "gpu002", "gpu005", "gpu009"]
    topology = resolve_topology(
        "auto", [NodeObservation(host=h) for h in hosts], JobObservation(slurm_topology=TREE)
    )
    assert names(topology) == ["node", "switch", "switch2", "machine"]
    assert paths(topology) == {
        "gpu001": ("spine0", "leaf0"),
        "gpu002": ("spine0", "leaf0"),
        "gpu005": ("spine0", "leaf1"),
        "gpu009": ("spine1", "leaf2"),
    }


def test_slurm_may_have_other_names_for_the_nodes():
    nodes = [NodeObservation(host=f"ip-{i}", slurm_node=f"gpu00{i}") for i in (4, 5)]
    topology = resolve_topology("auto", nodes, JobObservation(slurm_topology=TREE))
    assert paths(topology) == {"ip-4": ("leaf0",), "ip-5": ("leaf1",)}


def test_a_leaf_right_below_the_top_shares_no_domain_with_its_siblings():
    text = (
        "SwitchName=a Level=0 LinkSpeed=1 Nodes=n[1-2]\n"
        "SwitchName=b Level=0 LinkSpeed=1 Nodes=n3\n"
        "SwitchName=c Level=0 LinkSpeed=1 Nodes=n4\n"
        "SwitchName=ab Level=1 LinkSpeed=1 Nodes=n[1-3] Switches=a,b\n"
        "SwitchName=top Level=2 LinkSpeed=1 Nodes=n[1-4] Switches=ab,c\n"
    )
    found = topology_paths(text, {f"n{i}": f"n{i}" for i in range(1, 5)})
    assert found.paths["n3"] == ("ab", "b")
    assert found.paths["n4"] == ("c", "c")


def test_blocks_and_aggregated_blocks():
    hosts = [f"tray{i:02d}" for i in (1, 18, 19, 37, 55)]
    topology = resolve_topology(
        "auto", [NodeObservation(host=h) for h in hosts], JobObservation(slurm_topology=BLOCKS)
    )
    assert names(topology) == ["node", "block", "block2", "machine"]
    assert paths(topology)["tray18"] == ("rack[0-1]", "rack0")
    assert paths(topology)["tray55"] == ("rack[2-3]", "rack3")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No topology information available\n",
        "slurm_load_topo: Unable to contact slurm controller (connect failure)\n",
        "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=gpu[001-\nSwitchName=s1\nSwitchName=\n",
    ],
)
def test_useless_output_gives_a_flat_network(text):
    nodes = [NodeObservation(host="gpu001"), NodeObservation(host="gpu002")]
    topology = resolve_topology("auto", nodes, JobObservation(slurm_topology=text))
    assert names(topology) == ["node", "machine"]
    assert topology.notes[-1] == "nothing is known above the nodes: the network is taken as flat"


def test_addresses_of_half_the_nodes_are_enough():
    nodes = [on(f"b{i}.gpu00{i}", "block.node") for i in (1, 2)]
    nodes += [NodeObservation(host=f"gpu00{i}") for i in (3, 4)]
    job = JobObservation(slurm_topology=TREE)
    assert names(resolve_topology("auto", nodes, job)) == ["node", "block", "machine"]
    assert names(resolve_topology("auto", nodes[1:], job))[1] == "switch"


# --- xnames and platforms -------------------------------------------------------------------------


def test_auto_takes_chassis_and_cabinet_from_xnames():
    xnames = ["x1000c0s0b0n0", "x1000c0s7b1n0", "x1000c1s0b0n0", "x1001c0s0b0n0"]
    nodes = [NodeObservation(host=f"nid00{i}", xname=x) for i, x in enumerate(xnames)]
    topology = resolve_topology("auto", nodes, NO_JOB)
    assert names(topology) == ["node", "chassis", "cabinet", "machine"]
    assert paths(topology)["nid002"] == ("x1000", "c1")


def test_auto_recognises_frontier_by_host_names():
    nodes = [NodeObservation(host=f"frontier{i:05d}") for i in (1, 200)]
    topology = resolve_topology("auto", nodes, NO_JOB)
    assert names(topology) == ["pair", "node", "chassis", "group", "machine"]
    assert topology.notes[0] == "bandwidths of platform frontier, recognised by host names"
    assert "assumed: host numbers" in topology.notes[1]


def test_auto_prefers_xnames_to_numbered_hosts():
    nodes = [
        NodeObservation(host=f"frontier{i:05d}", xname=f"x2000c{i}s0b0n0") for i in range(1, 3)
    ]
    topology = resolve_topology("auto", nodes, NO_JOB)
    assert paths(topology)["frontier00002"] == ("x2000", "c2")


def test_a_recognised_platform_lends_bandwidths_to_slurms_switches():
    nodes = [on(f"top.g{i // 2}.nid00500{i}", "switch.switch.node") for i in range(4)]
    topology = resolve_topology("auto", nodes, JobObservation(cluster="lumi"))
    assert names(topology) == ["pair", "node", "switch", "machine"]
    assert [level.gbps for level in topology.levels] == [200, 50, 12.5, 11.6]
    assert topology.levels[2].evidence == "assumed"
    assert "recognised by cluster name lumi" in topology.notes[0]


@pytest.mark.parametrize("cluster", ["aurora-pbs-0001", "aurora"])
def test_auto_recognises_aurora_by_its_batch_server(cluster):
    nodes = [NodeObservation(host=h, xname=h) for h in ("x4117c3s3b0n0", "x4117c4s3b0n0")]
    topology = resolve_topology("auto", nodes, JobObservation(cluster=cluster))
    assert names(topology) == ["pair", "node", "chassis", "group", "machine"]


def test_host_names_that_many_platforms_have_recognise_none():
    nodes = [NodeObservation(host="nid005000"), NodeObservation(host="frontier00001")]
    assert names(resolve_topology("auto", nodes, NO_JOB)) == ["node", "machine"]


@pytest.mark.parametrize("from_address", [True, False])
def test_racks_of_a_named_platform_are_slurms_blocks(from_address):
    hosts = [f"tray{i:02d}" for i in (1, 18, 19)]
    blocks = {"tray01": "rack0", "tray18": "rack0", "tray19": "rack1"}
    if from_address:
        nodes = [on(f"{blocks[h]}.{h}", "block.node") for h in hosts]
        job = NO_JOB
    else:
        nodes = [NodeObservation(host=h) for h in hosts]
        job = JobObservation(slurm_topology=BLOCKS)
    topology = resolve_topology("gb200-nvl72", nodes, job)
    assert names(topology) == ["node", "rack", "machine"]
    assert paths(topology) == {h: (blocks[h],) for h in hosts}


def test_nvlink_domains_name_racks():
    nodes = [NodeObservation(host=f"n{i}", nvlink_domain=f"uuid{i // 2}") for i in range(4)]
    topology = resolve_topology("gb300-nvl72", nodes, NO_JOB)
    assert paths(topology)["n3"] == ("uuid1",)
    assert names(resolve_topology("auto", nodes, NO_JOB)) == ["node", "nvlink", "machine"]


def test_unknown_platform_lists_platforms():
    with pytest.raises(TopologyError, match="platforms are alps, aurora"):
        resolve_topology("nonesuch", [NodeObservation(host="a")], NO_JOB)


# --- files ----------------------------------------------------------------------------------------


def test_a_file_must_list_every_node(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(
        "name: t\nlevels: [{name: node, gbps: 5}, {name: machine, gbps: 1}]\n"
        "nodes: [{hosts: 'n[1-4]'}]\n"
    )
    nodes = [NodeObservation(host="n1"), NodeObservation(host="n3")]
    assert len(resolve_topology(str(path), nodes, NO_JOB).nodes) == 4
    with pytest.raises(TopologyError) as caught:
        resolve_topology(str(path), [*nodes, NodeObservation(host="m7")], NO_JOB)
    assert str(caught.value).startswith(f"{path} does not list node m7; add it under 'nodes:'")


DOCUMENTED = re.findall(
    r"^```yaml\n(.*?)^```",
    (Path(__file__).parents[1] / "docs" / "topology.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


def test_documented_files_work(tmp_path):
    for name, text in zip(("cluster", "mine"), DOCUMENTED, strict=True):
        (tmp_path / f"{name}.yaml").write_text(text)
    nodes = [NodeObservation(host=host) for host in ("n001", "n004", "n005")]
    cluster = resolve_topology(str(tmp_path / "cluster.yaml"), nodes, NO_JOB)
    assert names(cluster) == ["pair", "node", "switch", "machine"]
    assert paths(cluster)["gpu7"] == ("s1",)
    mine = resolve_topology(str(tmp_path / "mine.yaml"), nodes, NO_JOB)
    assert paths(mine) == {"n001": ("0",), "n004": ("0",), "n005": ("1",)}


def test_a_platform_file_next_to_a_topology_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(DOCUMENTED[1])
    path = tmp_path / "t.yaml"
    path.write_text("name: t\nplatform: ./mine.yaml\nnodes: [{hosts: a, leaf: l0}]\n")
    topology = resolve_topology(str(path), [NodeObservation(host="a")], NO_JOB)
    assert [level.gbps for level in topology.levels] == [450, 50, 25]


# --- observations ---------------------------------------------------------------------------------


def test_one_name_for_two_machines_is_an_error():
    nodes = [NodeObservation(host="localhost", xname=f"x1c0s{i}b0n0") for i in range(2)]
    with pytest.raises(TopologyError, match="node localhost reports twice: its xname is"):
        resolve_topology("auto", nodes, NO_JOB)


def test_a_node_may_report_several_times():
    whole = on("b1.n1", "block.node")
    topology = resolve_topology("auto", [NodeObservation(host="n1"), whole, whole], NO_JOB)
    assert paths(topology) == {"n1": ("b1",)}


def test_without_observations_the_nodes_are_those_of_the_allocation():
    job = JobObservation(hosts=("gpu001", "gpu005"), slurm_topology=TREE)
    assert paths(resolve_topology("auto", [], job))["gpu005"] == ("leaf1",)
    job = JobObservation(hosts=("x3001c0s13b0n0",))
    assert paths(resolve_topology("polaris", [], job)) == {"x3001c0s13b0n0": ("g0", "x3001")}
    with pytest.raises(TopologyError, match="no node is known"):
        resolve_topology("auto", [], NO_JOB)


observations = st.lists(
    st.builds(
        NodeObservation,
        host=st.integers(1, 12).map(lambda i: f"gpu{i:03d}"),
        slurm_address=st.sampled_from([None, "core.s0.gpu001", "core.s1.gpu002", "b.gpu003", ""]),
        slurm_pattern=st.sampled_from([None, "switch.switch.node", "block.node", "node"]),
        nvlink_domain=st.sampled_from([None, "0", "1"]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda node: node.host,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(observations, st.sampled_from(["", TREE]), st.sampled_from(["auto", "frontier", "mi300x"]))
def test_any_observations_give_one_topology_whatever_their_order(nodes, text, source):
    job = JobObservation(slurm_topology=text)
    topology = resolve_topology(source, nodes, job)
    assert {node.host for node in topology.nodes} == {node.host for node in nodes}
    shuffled = random.Random(0).sample(nodes, len(nodes))
    assert resolve_topology(source, shuffled, job) == topology
    domains = topology.domains([Location(node.host, 0) for node in nodes])
    assert set(domains[:, -1]) == {0}


@settings(derandomize=True, deadline=None, max_examples=30)
@given(observations)
def test_observations_survive_json(nodes):
    assert [NodeObservation.from_json(node.to_json()) for node in nodes] == nodes
    job = JobObservation(hosts=("a", "b"), slurm_topology=TREE, cluster="c")
    assert JobObservation.from_json(job.to_json()) == job


def test_nodes_are_in_natural_order():
    nodes = [NodeObservation(host=f"n{i}") for i in (10, 9, 2)]
    assert list(paths(resolve_topology("auto", nodes, NO_JOB))) == ["n2", "n9", "n10"]


@pytest.mark.parametrize(
    ("hostname", "host", "xname"),
    [
        ("frontier00012.frontier.olcf.ornl.gov", "frontier00012", None),
        ("x4117c3s3b0n0.hsn.cm.aurora.alcf.anl.gov", "x4117c3s3b0n0", "x4117c3s3b0n0"),
        ("10.0.0.7", "10.0.0.7", None),
    ],
)
def test_observe_node(monkeypatch, tmp_path, hostname, host, xname):
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)
    monkeypatch.setattr(observation, "XNAME_FILE", tmp_path / "absent")
    assert observe_node({}) == NodeObservation(host=host, xname=xname)


@pytest.mark.parametrize(
    ("content", "xname"),
    [(b"x1100c0s6b0n0\n", "x1100c0s6b0n0"), (b"\xff\xff", None), (b"ncn-w001\n", None)],
)
def test_xname_file(monkeypatch, tmp_path, content, xname):
    (tmp_path / "xname").write_bytes(content)
    monkeypatch.setattr(observation, "XNAME_FILE", tmp_path / "xname")
    assert observe_node({}).xname == xname


def test_observe_node_reads_slurms_variables():
    environ = {
        "SLURMD_NODENAME": "n5",
        "SLURM_TOPOLOGY_ADDR": "b0.n5",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node",
        "PIPER_NVLINK_DOMAIN": "0",
    }
    seen = observe_node(environ)
    assert (seen.slurm_node, seen.slurm_address, seen.slurm_pattern) == (
        "n5",
        "b0.n5",
        "block.node",
    )
    assert seen.nvlink_domain == "0"


def scontrol(tmp_path, script: str) -> str:
    command = tmp_path / "scontrol"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    return f"{tmp_path}:/usr/bin:/bin"


def test_observe_job(tmp_path):
    (tmp_path / "topology").write_text(TREE)
    script = f'[ "$1 $2" = "show topology" ] && [ -z "$SLURM_TOPO_LEN" ] && cat {tmp_path}/topology'
    job = observe_job(
        {
            "PATH": scontrol(tmp_path, script),
            "SLURM_JOB_NODELIST": "gpu[001-003,010],login1",
            "SLURM_CLUSTER_NAME": "big",
            "SLURM_TOPO_LEN": "20",
        }
    )
    assert job.hosts == ("gpu001", "gpu002", "gpu003", "gpu010", "login1")
    assert job.slurm_topology == TREE
    assert job.cluster == "big"


def test_observe_job_under_pbs():
    environ = {"PATH": "/nowhere", "PBS_JOBID": "308834.polaris-pbs-01.hsn.cm.polaris.alcf.anl.gov"}
    assert observe_job(environ) == JobObservation(cluster="polaris-pbs-01")


@pytest.mark.parametrize("script", ["exit 1", "exec sleep 60", "kill -9 $$"])
def test_observe_job_survives_a_failing_scontrol(monkeypatch, tmp_path, script):
    monkeypatch.setattr(observation, "SCONTROL_TIMEOUT_S", 0.5)
    environ = {"PATH": scontrol(tmp_path, script), "SLURM_JOB_NODELIST": "gpu[001-"}
    assert observe_job(environ) == NO_JOB
