"""Exchanges with the experts' ranks: rows by counting, published times and redundancies."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import platform, transfer

from piper_megatron.platform.platform import load_platform
from piper_megatron.resources.dispatch import announcement_cost, dispatch_cost, fast_level
from piper_megatron.resources.dispatch_rows import (
    Distinct,
    Rows,
    distinct_domains,
    expected,
    pairs_per_token,
    rows_per_token,
)
from piper_megatron.resources.reach import Reach
from piper_megatron.workload.spec import Experts, TrainingSpec

XMOE_LARGE = Experts(count=256, topk=8, ffn=2048)
PIPER = ("flat", "2dh", "halo", "rail", "rbd")


def reach(nodes: int, per_node: int = 8) -> Reach:
    """A group on whole nodes under one switch."""
    return Reach(nodes * per_node, (nodes, 1))


def cost(dispatcher: str, group: Reach, where=None, *, tokens=4096, row_bytes=7168 * 2, **more):
    training = TrainingSpec(
        precision="bf16", dispatcher=dispatcher, dispatcher_chunks=more.pop("chunks", None)
    )
    experts = more.pop("experts", XMOE_LARGE)
    return dispatch_cost(
        where or platform(),
        training,
        experts,
        group,
        tokens=tokens,
        row_bytes=row_bytes,
        **{"probabilities": False} | more,
    )


def rows(dispatcher: str, experts: Experts, nodes: int, per_node: int) -> Rows:
    """Of a dispatcher under uniform routing."""
    reached = expected(experts, nodes, per_node)
    return rows_per_token(dispatcher, experts.topk, reached, nodes, per_node)


def route(experts: Experts, tokens: int, seed: int) -> np.ndarray:
    """Experts that tokens visit, [tokens, top-k], chosen uniformly, inside kept groups."""
    random = np.random.default_rng(seed)
    scores = random.random((tokens, experts.count))
    if experts.groups:
        kept = random.random((tokens, experts.groups)).argsort(axis=1)[:, : experts.topk_groups]
        allowed = np.zeros((tokens, experts.groups), dtype=bool)
        np.put_along_axis(allowed, kept, True, axis=1)
        scores[~np.repeat(allowed, experts.count // experts.groups, axis=1)] = 2
    return scores.argsort(axis=1)[:, : experts.topk]


# 1 - D(M) / k in percent: piper.md 1.4 and 8 (16), X-MoE's measured 75.1 and 54.8
REDUNDANCY = {
    (256, 8): (75.1, 54.8, 33.8, 18.5, 9.2),
    (128, 8): (75.1, 54.6, 33.3, 17.5, 8.0),
    (128, 6): (67.1, 44.7, 25.5, 12.9, 5.8),
    (64, 6): (67.1, 44.2, 24.4, 11.4, 4.0),
    (384, 8): (75.1, 54.9, 34.0, 18.8, 9.5),
    (512, 10): (80.0, 62.2, 40.8, 23.4, 12.3),
}


@pytest.mark.parametrize("sizes", REDUNDANCY)
def test_acceptance_16_redundancy_of_node_deduplication(sizes):
    count, topk = sizes
    nodes = np.array([2, 4, 8, 16, 32])
    found = 1 - distinct_domains(Experts(count=count, topk=topk, ffn=1), nodes) / topk
    assert np.allclose(100 * found, REDUNDANCY[sizes], atol=0.051)


def test_group_limited_routing_reaches_fewer_nodes():
    # DeepSeek-V3: 8 groups of which 4 are kept
    limited = Experts(count=256, topk=8, ffn=2048, groups=8, topk_groups=4)
    assert float(distinct_domains(limited, 8)) == pytest.approx(3.63, abs=0.005)
    assert float(distinct_domains(XMOE_LARGE, 8)) == pytest.approx(5.30, abs=0.006)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.sampled_from([(64, 6, None), (64, 2, None), (64, 4, (8, 2)), (128, 8, (4, 3))]),
    st.sampled_from([1, 2, 4, 8, 16, 32]),
    st.integers(0, 99),
)
def test_closed_form_counts_distinct_domains(sizes, domains, seed):
    count, topk, groups = sizes
    experts = Experts(count=count, topk=topk, ffn=1)
    if groups:
        experts = experts.model_copy(update={"groups": groups[0], "topk_groups": groups[1]})
    visited = route(experts, 4000, seed) // (count // domains)
    counted = np.array([len(set(row)) for row in visited.tolist()])
    error = counted.std() / math.sqrt(len(counted))
    assert counted.mean() == pytest.approx(
        float(distinct_domains(experts, domains)), abs=4 * error + 1e-9
    )


@pytest.mark.parametrize(
    ("dispatcher", "between", "inside"),
    [
        ("flat", 0.75, 0.22),
        ("rail", 0.339, 0.795),
    ],
)
def test_rows_of_the_common_example(dispatcher, between, inside):
    """E 256, k 8, 4 nodes of 8: fractions of the routed rows."""
    found = rows(dispatcher, XMOE_LARGE, 4, 8)
    assert float(found.between) / 8 == pytest.approx(between, abs=0.001)
    assert float(found.inside) / 8 == pytest.approx(inside, abs=0.002)


def papers_replicas(experts: Experts, nodes: int, per_node: int) -> float:
    """Rows of a token that arXiv:2508.13337 sends inside nodes: one for every expert."""
    local = experts.count / (nodes * per_node)
    elsewhere = 1 - (local - 1) / (experts.count / nodes - 1)
    return (experts.topk - float(distinct_domains(experts, nodes))) * elsewhere


def test_replicas_for_each_rank_are_fewer_than_the_papers_for_each_expert():
    """The paper's 0.586 of the routed rows is an upper bound, reached with one expert a rank."""
    found = rows("rbd", XMOE_LARGE, 4, 8)
    assert float(found.between) / 8 == pytest.approx(0.339, abs=0.001)
    pilots, replicas = float(found.beside), float(found.near + found.spread)
    assert (pilots + papers_replicas(XMOE_LARGE, 4, 8)) / 8 == pytest.approx(0.586, abs=0.002)
    assert 0.9 * papers_replicas(XMOE_LARGE, 4, 8) < replicas < papers_replicas(XMOE_LARGE, 4, 8)
    alone = Experts(count=32, topk=8, ffn=1)
    found = rows("rbd", alone, 4, 8)
    assert float(found.near + found.spread) == pytest.approx(papers_replicas(alone, 4, 8))


def trips(dispatcher: str, pairs: list[int], token: int, per_node: int) -> dict[str, list]:
    """(Sender, receiver) of every row and pair of a token of rank 0 that a node needs.

    Args:
        pairs: rank of each of its experts on the node.
    """
    if dispatcher == "flat":
        direct = [(0, rank) for rank in pairs]
        return {"rows": direct, "pairs": direct}
    needed = sorted(set(pairs))
    # rails arrive at the sender's place in every node
    rail = needed[0] // per_node * per_node
    relay = rail if dispatcher == "rail" else needed[token % len(needed)]
    return {
        "rows": [(0, relay), *((relay, rank) for rank in needed)],
        "pairs": [*[(0, relay)] * len(pairs), *((relay, rank) for rank in pairs)],
    }


def count_trips(dispatcher: str, experts: Experts, nodes: int, per_node: int) -> dict[str, tuple]:
    """Rows and pairs per token that go to other nodes, and to other ranks of a node."""
    tokens = 4000
    ranks = route(experts, tokens, seed=3) // (experts.count // (nodes * per_node))
    counted = {"rows": np.zeros(2), "pairs": np.zeros(2)}
    for token, of_token in enumerate(ranks.tolist()):
        for node in {rank // per_node for rank in of_token}:
            of_node = [rank for rank in of_token if rank // per_node == node]
            for what, sent in trips(dispatcher, of_node, token, per_node).items():
                far = sum(a // per_node != b // per_node for a, b in sent)
                counted[what] += [far, sum(a != b for a, b in sent) - far]
    return {what: tuple(total / tokens) for what, total in counted.items()}


@pytest.mark.parametrize(
    ("nodes", "per_node", "count", "topk"),
    [(2, 4, 64, 6), (4, 2, 64, 6), (4, 8, 64, 4), (3, 4, 48, 3)],
)
@pytest.mark.parametrize("dispatcher", ["flat", "rail", "rbd"])
def test_rows_and_pairs_are_those_of_a_routed_batch(dispatcher, nodes, per_node, count, topk):
    experts = Experts(count=count, topk=topk, ffn=1)
    reached = expected(experts, nodes, per_node)
    counted = count_trips(dispatcher, experts, nodes, per_node)
    for what, formula in (("rows", rows_per_token), ("pairs", pairs_per_token)):
        found = formula(dispatcher, topk, reached, nodes, per_node)
        assert counted[what] == pytest.approx(
            (float(found.between), float(found.inside)), rel=0.03, abs=0.03
        )


def test_times_of_xmoes_redundancy_bypass():
    """X-MoE, one Large layer on 32 GCDs: 352 MB flat, 159 MB of pilots through 12.5 GB/s."""
    line_rate = platform(node_gbps=1e9)
    flat = cost("flat", reach(4), line_rate)
    assert float(flat.bytes_by_level[1]) == pytest.approx(352e6, rel=0.002)
    assert float(flat.seconds) == pytest.approx(28.2e-3, rel=0.002)
    pilots = cost("rail", reach(4), line_rate)
    assert float(pilots.bytes_by_level[1]) == pytest.approx(159e6, rel=0.002)
    assert float(pilots.seconds) == pytest.approx(12.7e-3, rel=0.005)
    # measured: 38.9 ms flat (implied), pilots 18.5 ms, replicas 4 ms
    real = platform(node_gbps=57, between=transfer(efficiency=0.7))
    assert float(cost("flat", reach(4), real).seconds) == pytest.approx(38.9e-3, rel=0.05)
    assert papers_replicas(XMOE_LARGE, 4, 8) * 4096 * 7168 * 2 == pytest.approx(229e6, rel=0.01)
    pilots = cost("rbd", reach(4), platform(node_gbps=1e9, between=transfer(efficiency=0.7)))
    assert float(pilots.seconds) == pytest.approx(18.5e-3, rel=0.02)
    # a rank's own replicas are passed on while others cross, which the paper's stages do not
    both = float(cost("rbd", reach(4), real).seconds)
    assert both == pytest.approx(18.5e-3 + 3 / 4 * 4e-3, rel=0.03)
    assert both < 22.5e-3


@pytest.mark.parametrize(("nodes", "flat", "halo"), [(4, 24, 3), (16, 120, 15)])
def test_acceptance_13_dispatch_bytes_and_messages(nodes, flat, halo):
    tokens, width = 4096, 7168
    group = reach(nodes)
    ep, row = 8 * nodes, tokens * 8 * 2 * width
    everybody = ep * sum(map(float, cost("flat", group).bytes_by_level))
    assert everybody == pytest.approx(2 * (ep - 1) * tokens * 8 * width)
    between = {
        name: float(cost(name, group, chunks=1).bytes_by_level[1])
        for name in ("flat", "halo", "2dh")
    }
    assert between["flat"] == pytest.approx(between["halo"]) == pytest.approx(between["2dh"])
    chunk = row / ep
    spread = 7 * (nodes - 1) * chunk
    near = 7 * chunk
    in_one_part = cost("halo", group, chunks=1)
    assert float(in_one_part.bytes_by_level[0]) == pytest.approx(near + spread)
    assert float(cost("flat", group).messages) == flat + 7
    assert float(in_one_part.messages) == halo + 2 * 7
    # more parts send the same bytes, each on its own inside the node
    in_three = cost("halo", group, chunks=3)
    assert np.allclose(in_three.bytes_by_level, in_one_part.bytes_by_level)
    assert float(in_three.messages) == halo + 4 * 7


def halo_and_flat(nodes: int, chunk_bytes: float) -> tuple[float, float]:
    where = platform(inside=transfer(latency_s=5e-6), between=transfer(latency_s=10e-6))
    tokens = chunk_bytes * 8 * nodes / XMOE_LARGE.topk
    return tuple(
        float(cost(name, reach(nodes), where, tokens=tokens, row_bytes=1, chunks=1).seconds)
        for name in ("halo", "flat")
    )


@pytest.mark.parametrize(("nodes", "crossover_mb"), [(2, 0.25), (4, 0.42), (16, 0.48), (32, 0.49)])
def test_acceptance_15_halo_wins_below_its_crossover(nodes, crossover_mb):
    remote = nodes - 1
    crossover = 50e9 * (10e-6 - 5e-6 / remote)
    assert crossover == pytest.approx(crossover_mb * 1e6, abs=0.006e6)
    halo, flat = halo_and_flat(nodes, 0.98 * crossover)
    assert halo < flat
    halo, flat = halo_and_flat(nodes, 1.02 * crossover)
    assert halo > flat
    halo, flat = halo_and_flat(nodes, 1e9)
    assert 1 < halo / flat <= 1.22 + 1e-3


@pytest.mark.parametrize(("nodes", "gain"), [(16, 2.7), (32, 3.8), (128, 6.1)])
def test_acceptance_15_short_messages_gain_by_their_number(nodes, gain):
    halo, flat = halo_and_flat(nodes, 4.2e6 / (8 * nodes))
    assert flat / halo == pytest.approx(gain, rel=0.02)


# nodes -> speed-up of HALO over RCCL, arXiv:2605.05049, figure 8
MEASURED_GAIN = {16: 1.80, 32: 8.03, 64: 4.94, 128: 4.40, 256: 5.56}


def test_acceptance_15_one_curve_of_fan_out_gives_the_measured_gains():
    ideal = platform()
    share = {}
    for nodes, gain in MEASURED_GAIN.items():
        halo, flat = (
            float(cost(n, reach(nodes), ideal, chunks=1).seconds) for n in ("halo", "flat")
        )
        share[nodes] = flat / halo / gain
    real = platform(between=transfer(fan_out=share))
    for nodes, gain in MEASURED_GAIN.items():
        halo, flat = (
            float(cost(n, reach(nodes), real, chunks=1).seconds) for n in ("halo", "flat")
        )
        assert flat / halo == pytest.approx(gain)


def announced(dispatcher: str, group: Reach, where=None, *, tokens=4096, experts=XMOE_LARGE):
    training = TrainingSpec(precision="bf16", dispatcher=dispatcher)
    return announcement_cost(
        where or platform(), training, experts, group, group, tokens=tokens, row_bytes=7168 * 2
    )


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.sampled_from([2, 4, 8, 16]),
    st.sampled_from([(64, 6), (256, 8), (128, 2)]),
    st.sampled_from([1e2, 1e4, 1e6]),
)
def test_auto_is_the_cheapest_round_trip_and_deduplication_never_sends_more(nodes, sizes, tokens):
    experts = Experts(count=sizes[0], topk=sizes[1], ffn=1)
    where = platform(inside=transfer(latency_s=5e-6), between=transfer(latency_s=1e-5))
    group, more = reach(nodes, 4), {"tokens": tokens, "experts": experts}

    def round_trip(name: str) -> float:
        there, back = (cost(name, group, where, probabilities=p, **more) for p in (True, False))
        return float((announced(name, group, where, **more) + there + back).seconds)

    assert round_trip("auto") == pytest.approx(min(map(round_trip, PIPER)), rel=1e-12)
    flat = float(cost("flat", group, where, **more).bytes_by_level[1])
    for name in ("rail", "rbd"):
        assert float(cost(name, group, where, **more).bytes_by_level[1]) < flat


def test_inside_a_node_auto_is_flat():
    inside, flat = cost("auto", reach(1)), cost("flat", reach(1))
    assert float(inside.seconds) == float(flat.seconds) > float(cost("rail", reach(1)).seconds)


def test_flat_costs_what_megatrons_alltoall_costs():
    for p in (False, True):
        ours, megatrons = (cost(n, reach(4), probabilities=p) for n in ("flat", "alltoall"))
        assert float(ours.seconds) == float(megatrons.seconds)
        assert float(ours.messages) == float(megatrons.messages) == (1 + p) * 31


def test_two_hops_overlap_in_parts():
    """Nodes of 8 x 4, 50 and 12.5 GB/s, no latencies: 21 parts far, 7 near, 21 spread a chunk."""
    unit = 4096 * 8 / 32 * 7168 * 2
    far, near, spread = 24 * unit / 12.5e9, 7 * unit / 50e9, 21 * unit / 50e9
    seconds = [float(cost("halo", reach(4), chunks=m).seconds) for m in (1, 2, 3, 9)]
    assert seconds[0] == pytest.approx(max(far, near) + spread)
    assert seconds[1] == pytest.approx(far + spread / 2)
    # no more parts than other nodes
    assert seconds[2] == seconds[3] == pytest.approx(far + spread / 3)
    parts = [float(cost("rail", reach(2), chunks=m).seconds) for m in (1, 4)]
    found = rows("rail", XMOE_LARGE, 2, 8)
    far, spread = (
        float(n) * 4096 * 7168 * 2 / rate
        for n, rate in ((found.between, 12.5e9), (found.spread, 50e9))
    )
    near = spread
    assert parts[0] == pytest.approx(max(near, far) + spread)
    assert parts[1] == pytest.approx(max(near + spread, far / 4 + spread, far + spread / 4))


def test_as_many_parts_as_pay():
    """Short exchanges go in one part, long ones in several."""
    where = platform(inside=transfer(startup_s=1e-5, latency_s=1e-6))
    for tokens, several in ((1, False), (65536, True)):
        best = float(cost("rail", reach(4), where, tokens=tokens).seconds)
        tried = [
            float(cost("rail", reach(4), where, tokens=tokens, chunks=m).seconds)
            for m in (1, 2, 4, 8)
        ]
        assert best == min(tried)
        assert (tried.index(best) > 0) is several


def test_a_trace_replaces_the_expectation():
    local = Distinct(nodes=1.0, ranks=1.0)
    found = rows_per_token("rail", 8, local, 4, 8)
    assert found.between == 0.75
    assert found.near + found.spread == pytest.approx(7 / 8)


def test_announcements_count_what_the_dispatchers_send():
    """64 experts on 2 nodes of 4: counts of 8 bytes, or tables of 4 and a bit for each expert."""
    experts = Experts(count=64, topk=6, ffn=1)
    group, tokens = reach(2, 4), 1000
    flat = announced("flat", group, experts=experts, tokens=tokens)
    assert sum(flat.bytes_by_level) == pytest.approx(7 * 64 * 8)
    found = rows("rail", experts, 2, 4)
    training = TrainingSpec(precision="bf16", dispatcher="rail", dispatcher_chunks=1)
    rail = announcement_cost(
        platform(), training, experts, group, group, tokens=tokens, row_bytes=2
    )
    tables = 7 * 4 * (64 + 2 * (1 + 2 * 4))
    bits = tokens * (4 * found.between + 1 * (found.near + found.spread))
    assert sum(rail.bytes_by_level) == pytest.approx(float(tables + bits))
    rbd = announced("rbd", group, experts=experts, tokens=tokens)
    assert sum(rbd.bytes_by_level) > sum(rail.bytes_by_level)


def test_many_groups_at_once_equal_each_alone():
    nodes = np.array([1, 2, 4, 8])
    together = Reach(8 * nodes, (nodes, np.ones_like(nodes)))
    for name in (*PIPER, "auto", "alltoall", "flex"):
        found = cost(name, together, load_platform("dgx-h100")).seconds
        alone = [float(cost(name, reach(int(n)), load_platform("dgx-h100")).seconds) for n in nodes]
        assert np.allclose(found, alone, rtol=1e-12)


def test_one_rank_exchanges_nothing():
    for name in (*PIPER, "auto", "alltoall", "flex"):
        assert float(cost(name, Reach(1, (1, 1))).seconds) == 0
        assert name == "flex" or float(announced(name, Reach(1, (1, 1))).seconds) == 0


def test_fused_kernels_span_a_rack_of_nvl72_but_deepep_only_its_trays():
    rack = load_platform("gb200-nvl72")
    assert rack.levels[fast_level(rack)].name == "rack"
    assert fast_level(load_platform("dgx-h100")) == 0
    assert fast_level(load_platform("frontier")) == load_platform("frontier").node_level
    group = Reach(64, (16, 1, 1))
    hybrid = dispatch_cost(
        rack,
        TrainingSpec(precision="bf16", dispatcher="flex", flex_backend="hybridep"),
        XMOE_LARGE,
        group,
        tokens=4096,
        row_bytes=7168 * 2,
    )
    flat = cost("alltoall", group, rack)
    # published: 675 us for HybridEP, 930 us for all-to-all, arXiv:2603.07685, table 7
    assert float(hybrid.seconds) == pytest.approx(675e-6, rel=0.25)
    assert float(flat.seconds) == pytest.approx(930e-6, rel=0.25)


def test_deepep_kernels_as_measured_on_h100():
    """ai-dynamo/aiconfigurator (095f58a5): 4096 tokens of 7168, 8-bit there, 16-bit back."""
    where = load_platform("dgx-h100")
    training = TrainingSpec(precision="bf16", dispatcher="flex", flex_backend="deepep")
    for nodes, dispatch_us, combine_us in [(1, 491, 973), (4, 1853, 3634)]:
        found = [
            float(
                dispatch_cost(
                    where,
                    training,
                    XMOE_LARGE,
                    reach(nodes),
                    tokens=4096,
                    row_bytes=row,
                    probabilities=there,
                ).seconds
            )
            for row, there in ((7168 + 4 * 56, True), (7168 * 2, False))
        ]
        assert found == pytest.approx([dispatch_us * 1e-6, combine_us * 1e-6], rel=0.2)


def test_experts_that_ranks_share_get_every_row_on_each():
    where = platform(node_gbps=100)
    once = cost("flex", reach(1), where)
    twice = cost("flex", reach(1), where, copies=2)
    assert float(twice.bytes_by_level[0]) > 1.2 * float(once.bytes_by_level[0])
    all_ranks = cost("flex", reach(1), where, copies=8)
    assert float(all_ranks.bytes_by_level[0]) == pytest.approx(4096 * 7168 * 2 * 7)
