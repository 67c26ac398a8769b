"""Logical ranks and node and rail groups, in real jobs on hosts of the launcher's making."""

import argparse
import os
import sys

import pytest
from tiny import SCRIPT, tiny_command

from piper_megatron.errors import LayoutError
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.placement import Placement, place
from piper_megatron.layout.traffic import traffic_of
from piper_megatron.platform.topology import Level, Location, Node, Topology
from piper_megatron.runtime.dispatch.groups import equal_shares, members_by_node
from piper_megatron.runtime.parallel_state import nodes_of_ranks

# launcher rank 0 opens the store on n1; logical rank 0 will be on n0
ROUND_ROBIN = ("n1", "n0") * 4


def test_members_of_a_node_are_found_wherever_they_stand():
    assert members_by_node(["a", "b", "a", "b"]) == ((0, 2), (1, 3))
    assert equal_shares(members_by_node(["a", "b", "a", "b"]))
    assert not equal_shares(members_by_node(["a", "a", "b"]))


def test_a_node_size_cuts_groups_into_parts_that_lie_inside_true_nodes():
    layout = ParallelLayout(world=8, tp=2, ep=4, etp=2)
    nodes = nodes_of_ranks(layout, ["a"] * 8, 2)
    # expert groups are 0 2 4 6 and 1 3 5 7
    for group in layout.groups("ep").tolist():
        assert members_by_node([nodes[rank] for rank in group]) == ((0, 1), (2, 3))
    on_two = ["a"] * 4 + ["b"] * 4
    assert len(set(nodes_of_ranks(layout, on_two, 1))) == 4
    assert equal_shares(members_by_node(nodes_of_ranks(layout, on_two, 2)))
    with pytest.raises(LayoutError, match=r"--piper-node-size 4 takes ranks 0 to 6.*on a and b"):
        nodes_of_ranks(layout, on_two, 4)
    with pytest.raises(LayoutError, match=r"ranks 0 to 2 .*add --piper-placement auto"):
        nodes_of_ranks(layout, ["a", "a", "b", "b"] * 2, 2)


def start_job(argv: list[str]) -> dict:
    """Starts Megatron as a script would; what this rank became."""
    import torch
    import torch.distributed as dist
    from megatron.core import mpu
    from megatron.training import get_args
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    import piper_megatron
    from piper_megatron.runtime.parallel_state import expert_groups, placed_job

    launcher_rank = int(os.environ["RANK"])
    sys.argv = ["job", *argv]
    piper_megatron.register()
    parse_and_validate_args()
    initialize_megatron()
    groups = expert_groups()
    members = dist.get_process_group_ranks
    return {
        "launcher_rank": launcher_rank,
        "rank": get_args().rank,
        "RANK": os.environ["RANK"],
        "LOCAL_RANK": os.environ["LOCAL_RANK"],
        "dist_rank": dist.get_rank(),
        "location": placed_job().locations[dist.get_rank()],
        "ep": members(mpu.get_expert_model_parallel_group()),
        "node": groups.node and members(groups.node),
        "rail": groups.rail and members(groups.rail),
        "timeouts": groups.node
        and {
            g._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for g in (groups.node, groups.rail)
        },
    }


def test_round_robin_hosts_get_whole_expert_groups(ranks):
    argv = tiny_command(
        "--piper-grid", "2x4", "--piper-placement", "auto", "--distributed-timeout-minutes", "7"
    )
    run = ranks.call(start_job, argv, world=8, hosts=ROUND_ROBIN).check()
    by_rank = sorted(run.values, key=lambda value: value["rank"])
    assert [value["rank"] for value in by_rank] == list(range(8))
    for value in by_rank:
        assert value["rank"] == value["dist_rank"] == int(value["RANK"])
        host = ROUND_ROBIN[value["launcher_rank"]]
        assert value["location"] == Location(host, int(value["LOCAL_RANK"]))
        assert {by_rank[peer]["location"].host for peer in value["ep"]} == {host}
        assert value["node"] == value["ep"]
        assert value["rail"] == [value["rank"]]
        assert value["timeouts"] == {7 * 60}
    assert by_rank[0]["launcher_rank"] == 1
    # contiguous blocks in local-rank order
    assert [value["location"].local_rank for value in by_rank] == [0, 1, 2, 3] * 2
    grid_map = next(output for output in run.outputs if "Piper grid 2x4" in output)
    assert "expert (EP)" in grid_map


@pytest.mark.parametrize("placement", ["none", "auto"])
def test_groups_over_two_nodes_have_rails_on_the_true_nodes(ranks, placement):
    argv = tiny_command("--piper-grid", "1x4", "--piper-placement", placement)
    run = ranks.call(start_job, argv, world=4, hosts=("n0", "n1") * 2).check()
    host = {value["rank"]: value["location"].host for value in run.values}
    for value in run.values:
        assert len({host[peer] for peer in value["node"]}) == 1
        assert len({host[peer] for peer in value["rail"]}) == len(value["rail"]) == 2
        assert set(value["node"]) & set(value["rail"]) == {value["rank"]}


def test_groups_of_shared_experts_are_split_by_their_own_index(ranks):
    argv = tiny_command(
        *"--piper-grid 1x2 --piper-placement auto --sequence-parallel".split(),
        *"--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2".split(),
    )
    run = ranks.call(start_job, argv, world=4, hosts=("n0", "n1") * 2).check()
    for value in run.values:
        assert value["ep"] in ([0, 2], [1, 3])
        assert value["node"] == [value["rank"]]
        assert value["rail"] == value["ep"]


def test_a_node_size_pretends_nodes_on_one_machine(ranks):
    argv = tiny_command("--piper-grid", "1x4", "--piper-node-size", "2")
    run = ranks.call(start_job, argv, world=4).check()
    for value in run.values:
        assert value["node"] in ([0, 1], [2, 3])
        assert value["rail"] in ([0, 2], [1, 3])


@pytest.mark.parametrize(
    ("flags", "hosts", "message"),
    [
        (
            ["--piper-dispatcher", "rail"],
            ("n0", "n0", "n0", "n1"),
            "--piper-dispatcher rail needs nodes that hold equally many ranks of an expert group, "
            "and ranks 0 to 3 are 3 on n0, 1 on n1; use --piper-dispatcher auto or flat, or "
            "--piper-placement auto",
        ),
        (
            ["--piper-node-size", "4"],
            ("n0", "n0", "n1", "n1"),
            "--piper-node-size 4 takes ranks 0 to 3 of an expert group for one node, and they run "
            "on n0 and n1",
        ),
    ],
)
def test_groups_that_do_not_split_are_refused_on_every_rank(ranks, flags, hosts, message):
    run = ranks.call(start_job, tiny_command("--piper-grid", "1x4", *flags), world=4, hosts=hosts)
    assert run.codes == [2] * 4
    for output in run.outputs:
        assert message in output
        assert "Traceback" not in output


def test_a_placement_file_and_a_topology_file_are_obeyed(ranks, tmp_path):
    (tmp_path / "network.yaml").write_text(
        "name: lab\nlevels: [{name: node, gbps: 9}, {name: machine, gbps: 1}]\n"
        "nodes: [{hosts: 'n[0-9]'}]\n"
    )
    (tmp_path / "placement.yaml").write_text("n1: [0, 1]\nn0: [3, 2]\n")
    argv = tiny_command(
        *("--piper-grid", "2x2", "--piper-topology", str(tmp_path / "network.yaml")),
        *("--piper-placement", str(tmp_path / "placement.yaml")),
    )
    run = ranks.call(start_job, argv, world=4, hosts=("n0", "n0", "n1", "n1")).check()
    assert [value["rank"] for value in run.values] == [3, 2, 0, 1]
    assert any("topology lab" in output for output in run.outputs)


def test_a_host_that_the_topology_file_lacks_is_named(ranks, tmp_path):
    (tmp_path / "network.yaml").write_text(
        "name: lab\nlevels: [{name: node, gbps: 9}, {name: machine, gbps: 1}]\n"
        "nodes: [{hosts: n0}]\n"
    )
    argv = tiny_command("--piper-topology", str(tmp_path / "network.yaml"))
    run = ranks.call(start_job, argv, world=2, hosts=("n0", "n7"))
    assert run.codes == [2, 2]
    for output in run.outputs:
        assert "does not list node n7" in output
        assert "Traceback" not in output


def test_unequal_nodes_train_without_rails_and_refuse_flex(ranks):
    hosts = ("n0", "n0", "n0", "n1")
    argv = tiny_command("--piper-grid", "1x4", "--piper-placement", "auto")
    run = ranks.call(start_job, argv, world=4, hosts=hosts).check()
    assert all(value["node"] is value["rail"] is None for value in run.values)
    assert any("rank // local size" in output for output in run.outputs)


def test_flex_is_refused_where_nodes_are_not_contiguous(monkeypatch):
    from piper_megatron.errors import PiperError
    from piper_megatron.runtime.parallel_state import _refuse_flex

    topology = Topology("two", (Level("node", 100), Level("machine", 10)), (Node("n0"), Node("n1")))
    layout = ParallelLayout(world=4, ep=4)
    hosts = [Location("n0", 0), Location("n0", 1), Location("n0", 2), Location("n1", 0)]
    placement: Placement = place(layout, topology, hosts, traffic_of(layout), "auto")
    _refuse_flex(argparse.Namespace(moe_token_dispatcher_type="alltoall"), placement)
    with pytest.raises(PiperError, match=r"--moe-token-dispatcher-type flex.*use alltoall"):
        _refuse_flex(argparse.Namespace(moe_token_dispatcher_type="flex"), placement)


def test_placement_changes_no_digit_of_the_losses(ranks):
    """The same logical job on other devices: the same sums in the same order."""
    command = tiny_command("--piper-grid", "2x4", iterations=5)
    as_launched = ranks.run(SCRIPT, command, 8, hosts=ROUND_ROBIN).check()
    placed = ranks.run(
        SCRIPT, [*command, "--piper-placement", "auto"], 8, hosts=ROUND_ROBIN
    ).check()
    assert len(placed.losses) == 5
    assert placed.losses == as_launched.losses
    assert placed.grad_norms == as_launched.grad_norms
