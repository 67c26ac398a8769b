"""`--piper-dispatcher auto`: by price, by what was measured, and in real jobs."""

import re

import pytest
from made_up import platform, transfer
from tiny import SCRIPT, tiny_command

from piper_megatron.errors import TopologyError
from piper_megatron.platform.dispatch_profile import DispatchProfile
from piper_megatron.platform.job_platform import platform_of_job
from piper_megatron.platform.platform import Platform, load_platform
from piper_megatron.platform.topology import Level, Location, Node, Topology
from piper_megatron.resources.dispatch_rows import Distinct
from piper_megatron.resources.dispatcher_choice import DispatcherChoice, choose_dispatcher
from piper_megatron.resources.reach import Reach
from piper_megatron.workload.dispatcher_flags import ALGORITHMS
from piper_megatron.workload.spec import Experts, TrainingSpec

EXPERTS = Experts(count=64, topk=8, ffn=1)
LATENT = transfer(startup_s=1e-5, latency_s=5e-6)


def choose(
    where: Platform, nodes: int = 4, *, chunks: int | None = None, **more
) -> DispatcherChoice:
    sizes = {"tokens": 4096, "row_bytes": 2048} | more
    return choose_dispatcher(
        where,
        TrainingSpec(precision="bf16", dispatcher="auto", dispatcher_chunks=chunks),
        EXPERTS,
        Reach(4 * nodes, (nodes, 1)),
        **sizes,
    )


def profile(**more) -> DispatchProfile:
    return DispatchProfile.model_validate(
        {
            "nodes": 4,
            "per_node": 4,
            "experts": 64,
            "topk": 8,
            "token_bytes": [1e6, 1e8],
            "seconds": {"flat": [1e-3, 1e-2], "2dh": [2e-3, 1e-3]},
            "evidence": "measured",
            "source": "our own",
            **more,
        }
    )


def test_deduplication_wins_on_a_slow_network_and_does_not_matter_inside_a_node():
    slow = platform(network_gbps=1.0, inside=LATENT, between=LATENT)
    choice = choose(slow)
    assert choice.algorithm in ("rail", "rbd")
    assert choice.seconds[choice.algorithm] == min(choice.seconds.values())
    assert list(choice.seconds) == list(ALGORITHMS)
    assert choice.why == "predicted from assumed bandwidths on made-up"
    alone = choose(slow, nodes=1)
    assert (alone.algorithm, alone.chunks, alone.seconds) == ("flat", 1, {})
    assert "inside one node" in alone.why
    unequal = choose(slow, equal_shares=False)
    assert unequal.algorithm == "flat"
    assert "unequal" in unequal.why


def test_a_trace_without_redundancy_takes_away_the_reason_to_deduplicate():
    slow = platform(node_gbps=2.0, network_gbps=1.0, inside=LATENT)
    assert choose(slow).algorithm in ("rail", "rbd")
    nowhere_twice = Distinct(nodes=3.99, ranks=8.0)
    fast = choose(slow, reached=Distinct(nodes=1.0, ranks=1.0)).seconds["rail"]
    assert fast < choose(slow, reached=nowhere_twice).seconds["rail"]


def test_parts_are_as_asked_for_or_as_many_as_pay():
    where = platform(network_gbps=25.0, inside=LATENT)
    assert choose(where, among=("rail",), chunks=3).chunks == 3
    assert choose(where, among=("halo",), chunks=9).chunks == 3
    assert choose(where, among=("rbd",)).chunks == 1
    assert choose(where, among=("rail",), tokens=1).chunks == 1
    assert choose(where, among=("rail",), tokens=10**6).chunks > 1


def test_what_was_measured_decides_over_the_model():
    where = platform(network_gbps=1.0).model_copy(update={"dispatch": (profile(),)})
    assert choose(where, tokens=500).seconds == pytest.approx(
        {"flat": 1e-3 * 1.024**0.5, "2dh": 2e-3 * 1.024 ** -(0.30103 / 2)}, rel=1e-4
    )
    assert choose(where, tokens=500).algorithm == "flat"
    large = choose(where, tokens=40_000)
    assert (large.algorithm, large.why) == ("2dh", "measured (our own)")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"tokens": 100}, ", since its measurements do not reach this size"),
        ({"tokens": 50_000}, ", since its measurements do not reach this size"),
        ({"nodes": 2}, ", since its measurements have no such group"),
    ],
)
def test_nothing_is_read_off_outside_what_was_measured(more, why):
    where = platform(network_gbps=1.0).model_copy(update={"dispatch": (profile(),)})
    choice = choose(where, **more)
    assert len(choice.seconds) == len(ALGORITHMS)
    assert choice.why == f"predicted from assumed bandwidths on made-up{why}"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seconds", {"flat": [1.0]}, "seconds.flat has 1 numbers for 2 of token_bytes"),
        ("token_bytes", [2.0, 1.0], "token_bytes must ascend"),
        ("seconds", {"fast": [1.0, 2.0]}, "flat"),
        ("node", 3, "unknown key 'node'; did you mean 'nodes'"),
    ],
)
def test_a_malformed_profile_is_one_line_with_the_key(tmp_path, key, value, message):
    entry = profile().model_dump(mode="json") | {key: value}
    path = tmp_path / "mine.yaml"
    level = "{name: node, gbps: 1, evidence: assumed, source: x}"
    path.write_text(
        f"name: mine\ndescription: x\nranks_per_node: 4\nlevels: [{level}]\ndispatch: [{entry}]\n"
    )
    with pytest.raises(TopologyError, match=re.escape(message)) as caught:
        load_platform(str(path))
    assert "dispatch" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_job_takes_what_is_known_of_its_machine():
    frontier = load_platform("frontier")
    levels = frontier.network()
    hosts = [Location("a", i) for i in range(8)]
    topology = Topology("auto", levels, (Node("a", ("g", "c")),))
    assert platform_of_job(topology, hosts, frontier) is frontier
    own_words = (*levels[:2], Level("block", 12.5, source="x"), Level("machine", 10.0))
    found = platform_of_job(Topology("auto", own_words, (Node("a", ("b",)),)), hosts, frontier)
    assert found.accelerator is frontier.accelerator
    assert found.levels[0].transfer == frontier.levels[0].transfer
    assert found.levels[2].transfer is None


def test_a_job_on_an_unknown_machine_is_priced_by_its_bandwidths():
    levels = (Level("pair", 200, 2), Level("node", 100), Level("machine", 10.0))
    topology = Topology("Some lab", levels, (Node("a"), Node("b")))
    locations = [Location(host, i) for host in "ab" for i in range(3)]
    found = platform_of_job(topology, locations, None)
    assert (found.ranks_per_node, found.accelerator) == (4, None)
    choice = choose_dispatcher(
        found,
        TrainingSpec(precision="bf16", dispatcher="auto"),
        EXPERTS,
        Reach(4, (4, 2, 1)),
        tokens=4096,
        row_bytes=2048,
    )
    assert choice.algorithm in ("rail", "rbd")
    assert "assumed" in choice.why


AUTO = ("--piper-grid", "1x4", "--piper-dispatcher", "auto")


def said(outputs: list[str]) -> list[str]:
    return re.findall(r"--piper-dispatcher auto takes .*", "".join(outputs))


def test_jobs_choose_say_so_once_and_learn_the_same(ranks, tmp_path):
    (tmp_path / "lab.yaml").write_text(
        "name: lab\ndescription: x\nranks_per_node: 2\n"
        "levels: [{name: node, gbps: 9, evidence: assumed, source: x},\n"
        "  {name: machine, gbps: 0.001, evidence: measured, source: x}]\n"
    )
    argv = tiny_command(*AUTO, "--piper-topology", str(tmp_path / "lab.yaml"), iterations=2)
    run = ranks.run(SCRIPT, argv, 4, hosts=("n0", "n0", "n1", "n1")).check()
    (line,) = said(run.outputs)
    assert re.search(
        r"takes r(ail|bd).*: predicted .*on lab; ms of a dispatch and combine: r", line
    )
    plain = ranks.run(SCRIPT, tiny_command("--piper-grid", "1x4", iterations=2), 4).check()
    inside = ranks.run(SCRIPT, tiny_command(*AUTO, iterations=2), 4).check()
    assert run.losses == pytest.approx(plain.losses, rel=1e-6)
    assert inside.losses == plain.losses
    assert said(inside.outputs) == [
        "--piper-dispatcher auto takes flat: the expert group lies inside one node"
    ]


def test_unequal_nodes_take_flat(ranks):
    argv = tiny_command(*AUTO, iterations=1)
    run = ranks.run(SCRIPT, argv, 4, hosts=("n0", "n0", "n0", "n1")).check()
    assert said(run.outputs) == [
        "--piper-dispatcher auto takes flat: nodes hold unequal shares of the expert group"
    ]


def test_pretended_nodes_are_chosen_for_as_nodes(ranks):
    argv = tiny_command(*AUTO, "--piper-node-size", "2", iterations=1)
    run = ranks.run(SCRIPT, argv, 4).check()
    (line,) = said(run.outputs)
    assert "predicted from assumed bandwidths on this-job" in line
