"""What Piper's dispatchers send, in which order, what they wait for; what becomes of lost peers."""

import re
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from real_dispatcher_traffic import (
    MEGATRONS,
    Collective,
    Message,
    Trace,
    host_copies_of_all,
    lose_a_peer,
    rows_sent,
    traces_of_all,
)
from real_dispatchers import EACH, Layout, Problem, Variant
from test_dispatcher import (
    ANY_MAP,
    EIGHT_RANKS,
    FOUR_RANKS,
    LONG,
    PAIRS,
    TOLERANCES,
    only,
    ragged,
    routed,
)

from piper_megatron.resources.dispatch_rows import expected, rows_per_token
from piper_megatron.workload.spec import Experts

METADATA_GROUP = "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
IN_ROUNDS = (Variant("halo", 3), Variant("rail", 3))


# --- rows


def rows_of_tokens(problem: Problem, algorithm: str) -> np.ndarray:
    """Rows that each token is sent as inside nodes and between, [T, 2], by their definition."""
    hosts, e = problem.layout.hosts, problem.local_experts
    local_index = [hosts[:rank].count(hosts[rank]) for rank in range(len(hosts))]
    rows = []
    for source, map_TE in enumerate(problem.maps):
        here, index = hosts[source], local_index[source]
        for token, chosen in enumerate(map_TE):
            pairs = [expert // e for expert in np.flatnonzero(chosen)]
            ranks = sorted(set(pairs))
            nodes = {hosts[rank] for rank in ranks}
            if algorithm in ("rail", "rbd"):
                slow = sum(node != here for node in nodes)
            else:
                slow = sum(hosts[rank] != here for rank in pairs)
            match algorithm:
                case "flat":
                    fast = sum(hosts[rank] == here and rank != source for rank in pairs)
                case "2dh" | "halo":
                    fast = sum(local_index[rank] != index for rank in pairs)
                case "rail":
                    fast = sum(local_index[rank] != index for rank in ranks)
                case "rbd":
                    beside = [rank for rank in ranks if hosts[rank] == here]
                    pilot = beside[token % len(beside)] if beside else source
                    fast = len(ranks) - len(nodes) + (pilot != source)
            rows.append((fast, slow))
    return np.array(rows)


UNIFORM = tuple(
    routed(Layout(hosts), 2, topk, tokens=(80,) * len(hosts), hidden=2)
    for hosts, topk in (("aaaabbbb", 4), ("aabbccdd", 4), ("aabbccdd", 8))
)
COUNTED = (
    *UNIFORM,
    routed(Layout("aaaabbbb"), 2, 2, only({0, 9}, {2, 3}, {0, 1}, {8, 15}), tokens=LONG),
    routed(Layout("dabcbdca"), 2, 16, ragged, tokens=LONG, settings=ANY_MAP),
    routed(Layout("abcdefgh"), 1, 3, tokens=LONG),
)


@pytest.fixture(scope="module")
def counted(ranks):
    """Of each of COUNTED and each variant: rows of all ranks, [4 directions, inside and between]"""
    done = ranks.call(rows_sent, list(COUNTED), world=8).check()
    return [
        {name: sum(each[i][name] for each in done.values) for name in done.values[0][i]}
        for i in range(len(COUNTED))
    ]


@pytest.mark.parametrize("i", range(len(COUNTED)))
@pytest.mark.parametrize("variant", EACH, ids=str)
def test_rows_are_those_of_the_map_in_all_directions(counted, i, variant):
    rows = rows_of_tokens(COUNTED[i], variant.algorithm).sum(0)
    assert counted[i][str(variant)].tolist() == [rows.tolist()] * 4


@pytest.mark.parametrize("i", range(len(UNIFORM)))
@pytest.mark.parametrize("variant", EACH, ids=str)
def test_rows_of_uniform_routing_are_those_of_the_closed_form(counted, i, variant):
    problem = UNIFORM[i]
    hosts, tokens = problem.layout.hosts, sum(problem.tokens)
    nodes, per_node = len(set(hosts)), hosts.count("a")
    experts = Experts(count=problem.experts, topk=problem.topk, ffn=8)
    reached = expected(experts, nodes, per_node)
    closed = rows_per_token(variant.algorithm, problem.topk, reached, nodes, per_node)
    mean = counted[i][str(variant)][0] / tokens
    sigma = rows_of_tokens(problem, variant.algorithm).std(0) / np.sqrt(tokens)
    assert (abs(mean - (closed.inside, closed.between)) <= 3 * sigma + 1e-9).all()


# --- order

TRACED = {
    "dropless": routed(Layout("abba"), 2, 3, variants=EACH + IN_ROUNDS),
    "rows of 4 KiB": routed(PAIRS, 2, 3, hidden=512, variants=EACH + IN_ROUNDS),
    **{
        name: FOUR_RANKS[name]
        for name in (
            "router picks",
            "recomputation",
            "padded to capacity",
            "a rank has no part",
            "a node has no part",
            "no tokens",
            "etp 2",
        )
    },
}
TRACED_ON_EIGHT = {
    name: replace(EIGHT_RANKS[name], variants=EACH + IN_ROUNDS)
    for name in ("4x2 in disorder", "4x2, a node has no part", "8x1")
}
ALL_TRACED = TRACED | TRACED_ON_EIGHT


@pytest.fixture(scope="module")
def traces(ranks):
    """Of every problem and dispatcher, the trace of every rank."""
    found = {}
    for world, problems in ((4, TRACED), (8, TRACED_ON_EIGHT)):
        done = ranks.call(traces_of_all, list(problems.values()), world=world).check()
        for i, name in enumerate(problems):
            found[name] = {v: [each[i][v] for each in done.values] for v in done.values[0][i]}
    return found


def collectives(trace: Trace) -> list[Collective]:
    return [event for event in trace if isinstance(event, Collective)]


@pytest.mark.parametrize("name", ALL_TRACED)
def test_collectives_come_in_the_same_order_on_all_ranks(traces, name):
    for variant, of_ranks in traces[name].items():
        in_order = [[(c.operation, c.group) for c in collectives(trace)] for trace in of_ranks]
        assert in_order.count(in_order[0]) == len(of_ranks), variant
        assert all(of_ranks)


@pytest.mark.parametrize("name", ALL_TRACED)
def test_members_of_a_group_agree_on_its_collectives(traces, name):
    for variant, of_ranks in traces[name].items():
        by_group = defaultdict(dict)
        for rank, trace in enumerate(of_ranks):
            for group, ranks in {(c.group, c.ranks) for c in collectives(trace)}:
                by_group[group, ranks][rank] = [c for c in collectives(trace) if c.ranks == ranks]
        for (_, ranks), members in by_group.items():
            assert tuple(members) == ranks, variant
            for same in zip(*members.values(), strict=True):
                assert len({c.operation for c in same}) == 1, variant
                if same[0].operation == "alltoall_base_":
                    sent = np.array([c.sent for c in same])
                    assert np.array_equal(sent.T, [c.received for c in same]), variant


@pytest.mark.parametrize("name", ALL_TRACED)
def test_messages_of_a_pair_match_in_order_and_size(traces, name):
    for variant, of_ranks in traces[name].items():
        sent, received = defaultdict(list), defaultdict(list)
        for rank, trace in enumerate(of_ranks):
            for event in trace:
                if isinstance(event, Message):
                    is_sent = event.operation == "send"
                    ends = (rank, event.peer) if is_sent else (event.peer, rank)
                    message = (event.tag, event.size_bytes)
                    (sent if is_sent else received)[event.group, *ends].append(message)
        assert sent == received, variant
        assert all(size > 0 for pair in sent.values() for _, size in pair), variant


def test_halo_and_rail_send_messages_between_nodes_along_rails(traces):
    hosts = TRACED["dropless"].layout.hosts
    for variant, of_ranks in traces["dropless"].items():
        if variant.startswith(("halo", "rail")):
            for rank, trace in enumerate(of_ranks):
                messages = [event for event in trace if isinstance(event, Message)]
                assert messages
                for event in messages:
                    rail = event.group == "EXPERT_RAIL_GROUP"
                    assert (hosts[event.peer] != hosts[rank]) == rail


@pytest.mark.parametrize("name", ALL_TRACED)
def test_counts_are_gathered_once_even_if_the_layer_is_recomputed(traces, name):
    for variant, of_ranks in traces[name].items():
        if variant == MEGATRONS:
            continue
        # drop-and-pad sends as many rows to every expert, which rail and rbd must be told
        known = name == "padded to capacity" and variant.startswith(("flat", "2dh", "halo"))
        for trace in of_ranks:
            gathered = [c for c in collectives(trace) if c.operation == "_allgather_base_"]
            assert [c.group for c in gathered] == [METADATA_GROUP] * (not known), variant


@pytest.mark.parametrize("name", ["dropless", "router picks", "padded to capacity"])
def test_flat_makes_the_collectives_of_megatron(traces, name):
    assert traces[name]["flat in 1"] == traces[name][MEGATRONS]


@pytest.mark.parametrize("name", ["a rank has no part", "a node has no part", "no tokens"])
@pytest.mark.parametrize("variant", ["flat in 1", "2dh in 1", "rail in 1", "rbd in 1"])
def test_no_rank_takes_part_in_an_all_to_all_with_nothing(traces, name, variant):
    """RCCL hangs there; Megatron's own dispatcher does it."""
    exchanges = [
        c
        for trace in traces[name][variant]
        for c in collectives(trace)
        if c.operation == "alltoall_base_"
    ]
    assert exchanges
    assert all(sum(c.sent) and sum(c.received) for c in exchanges)
    megatrons = [c for trace in traces[name][MEGATRONS] for c in collectives(trace)]
    assert any(c.sent and not sum(c.sent) for c in megatrons)


# --- copies to the host


COPYING = ("top-3", "one local expert", "etp 2", "capacity", "ep 1")


@pytest.fixture(scope="module")
def copies_of_ranks(ranks):
    """Of each of COPYING, the copies of every rank."""
    problems = [FOUR_RANKS[name] for name in COPYING]
    done = ranks.call(host_copies_of_all, problems, world=4).check()
    return dict(zip(COPYING, zip(*done.values, strict=True), strict=True))


@pytest.mark.parametrize("name", COPYING)
@pytest.mark.parametrize("variant", EACH, ids=str)
def test_the_host_waits_for_the_device_once_where_megatron_does(copies_of_ranks, name, variant):
    for of_rank in copies_of_ranks[name]:
        megatrons, copies = of_rank[MEGATRONS], of_rank[str(variant)]
        # nothing was read before the wait
        tolerance = 0 if variant.only_moves else TOLERANCES["float64"]
        assert max(copies.differences.values()) <= tolerance
        assert copies.synchronizations == megatrons.synchronizations == 1
        assert copies.other <= (megatrons.other if variant.only_moves else Counter())


# --- lost peers

LOST, SURVIVORS = 3, (0, 1, 2)


@pytest.fixture
def lose(ranks, tmp_path):
    """Loses a rank; returns the errors of the others, which must name it."""

    def lose_one(
        variant: Variant,
        phase: str = "token_dispatch",
        timeout_s: float | None = None,
        problem: Problem = FOUR_RANKS["top-3"],
    ) -> list[str]:
        arguments = (problem, variant, LOST, phase, timeout_s, tmp_path)
        errors = ranks.call(lose_a_peer, *arguments, world=4).check().values
        return [named_error(rank, errors[rank]) for rank in SURVIVORS]

    return lose_one


@pytest.mark.parametrize("variant", EACH, ids=str)
@pytest.mark.parametrize("phase", ["token_dispatch", "token_combine"])
def test_a_peer_that_ends_is_named_with_layer_and_hop(lose, variant, phase):
    lose(variant, phase)


@pytest.mark.parametrize("algorithm", ["2dh", "rail"])
def test_a_peer_that_hangs_is_named_after_the_timeout(lose, algorithm):
    for error in lose(Variant(algorithm), timeout_s=3.0):
        assert "Timed out" in error


def test_a_peer_that_sends_nothing_is_named(lose):
    lose(Variant("halo"), problem=routed(PAIRS, 2, 2, only({6, 7}), tokens=(7, 5, 8, 0)))


def named_error(rank: int, error: str) -> str:
    named = re.match(
        rf"TransferError: token dispatcher, layer 7, hop [a-z ]+: rank {rank} waited for "
        r"ranks ([\d, ]+): ",
        error,
    )
    assert named, error
    waited_for = set(map(int, named[1].split(", ")))
    assert rank not in waited_for
    # ranks 1 and 2 are on its rail and on its node; rank 0 may wait for those that wait for it
    assert LOST in waited_for or rank == 0
    return error
