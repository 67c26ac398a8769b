"""The arithmetic of groups on nested levels against the ranks of real grids."""

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piper_megatron.layout.crossing import meeting_shares
from piper_megatron.layout.grid import GROUPS, ParallelLayout
from piper_megatron.layout.sizes import Sizes
from piper_megatron.layout.traffic import Pattern
from piper_megatron.platform.platform import NetworkLevel, Platform, load_platform
from piper_megatron.resources.reach import (
    domain_sizes,
    instances_at_levels,
    members_at_levels,
)


def machine(ranks_per_node: int, rack_nodes: int) -> Platform:
    """Half nodes, nodes and racks, as far as they divide."""
    inside = [("half", {"ranks": ranks_per_node // 2})] if ranks_per_node % 2 == 0 else []
    levels = [*inside, ("node", {}), ("rack", {"nodes": rack_nodes}), ("machine", {})]
    return Platform(
        name="made-up",
        description="made up",
        ranks_per_node=ranks_per_node,
        levels=tuple(
            NetworkLevel(name=name, gbps=1, evidence="assumed", source="made up", **size)
            for name, size in levels
        ),
    )


def sizes_of(layout: ParallelLayout) -> Sizes:
    return Sizes(**asdict(layout), vpp=1, micro_batch=1, global_batch=layout.dp, seq=1)


def domains_of(platform: Platform, physical: np.ndarray) -> np.ndarray:
    """Domain numbers [world, levels] of ranks that fill nodes one after another."""
    columns = [physical // (size or len(physical)) for size in domain_sizes(platform)]
    return np.column_stack(columns)


def most_domains(groups: np.ndarray, of_rank: np.ndarray) -> int:
    return max(len(set(of_rank[group].tolist())) for group in groups)


powers = st.sampled_from([1, 2, 4, 8])


@st.composite
def layouts(draw, divisible: bool):
    """A grid and a machine; whether sizes are powers of two or anything."""
    size = powers if divisible else st.integers(1, 6)
    tp, cp, pp, ep, etp = (draw(size) for _ in range(5))
    stage = int(np.lcm(tp * cp, ep * etp)) * draw(size)
    layout = ParallelLayout(world=stage * pp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    per_node = draw(powers if divisible else st.integers(1, 12))
    return layout, machine(per_node, draw(st.sampled_from([2, 4] if divisible else [2, 3, 5])))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layouts(divisible=True), st.sampled_from(list(GROUPS)))
def test_shares_equal_those_of_the_real_grid_where_sizes_divide(job, kind):
    layout, platform = job
    if layout.group_size(kind) == 1 or layout.world > 2048:
        return
    reach = members_at_levels(platform, sizes_of(layout), kind)
    domains = domains_of(platform, np.arange(layout.world))
    for pattern, leaving in (
        (Pattern.ALL_TO_ALL, reach.leaving_all_to_all()),
        (Pattern.COLLECTIVE, reach.leaving_ring()),
    ):
        exact = meeting_shares(layout.groups(kind), pattern, domains, platform.node_level)
        if pattern is Pattern.COLLECTIVE:
            # inside a node rings are built as if halves stood side by side, too
            exact = exact[platform.node_level + 1 :]
            leaving = leaving[platform.node_level + 1 :]
        met = -np.diff([*np.asarray(leaving, dtype=float), 0.0])
        assert np.allclose(met, exact)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layouts(divisible=False), st.sampled_from(list(GROUPS)))
def test_the_group_that_reaches_furthest_is_found_where_sizes_do_not_divide(job, kind):
    layout, platform = job
    if layout.world > 2048:
        return
    reach = members_at_levels(platform, sizes_of(layout), kind)
    assert reach.members == layout.group_size(kind)
    domains = domains_of(platform, np.arange(layout.world))
    groups = layout.groups(kind)
    # a comb may step over a domain, and a job of few groups may miss the worst start
    for level, size in enumerate(domain_sizes(platform)):
        exact, found = most_domains(groups, domains[:, level]), int(reach.domains[level])
        assert exact <= found
        in_a_row = kind in ("tp", "tp_ep")
        all_starts = size is None or layout.world % int(np.lcm(groups.shape[1], size)) == 0
        if in_a_row and all_starts:
            assert exact == found


@pytest.mark.parametrize(
    ("world", "ep", "racks"), [(72, 72, 1), (64, 32, 1), (256, 64, 1), (256, 32, 1), (288, 72, 2)]
)
def test_jobs_on_several_racks_take_segments_of_them(world, ep, racks):
    platform = load_platform("gb200-nvl72")
    layout = ParallelLayout(world=world, tp=1, cp=1, pp=1, ep=ep, etp=1)
    reach = members_at_levels(platform, sizes_of(layout), "ep")
    names = [level.name for level in platform.levels]
    assert int(reach.domains[names.index("rack")]) == racks


def piper_order(layout: ParallelLayout, cell: int) -> np.ndarray:
    """The device of every logical rank when replicas of cells are packed side by side."""
    logical = np.arange(layout.world).reshape(layout.pp, -1, cell)
    physical = np.empty(layout.world, dtype=int)
    physical[logical.transpose(1, 0, 2).ravel()] = np.arange(layout.world)
    return physical


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layouts(divisible=True), st.sampled_from(list(GROUPS)))
def test_pipers_placement_equals_the_packed_grid(job, kind):
    layout, platform = job
    bundle = int(np.lcm(layout.tp * layout.cp, layout.ep * layout.etp))
    cell = int(np.lcm(bundle, platform.ranks_per_node))
    stage = layout.world // layout.pp
    if layout.world > 2048 or stage % cell:
        return
    reach = members_at_levels(platform, sizes_of(layout), kind, "piper")
    domains = domains_of(platform, piper_order(layout, cell))
    for level in range(domains.shape[1]):
        assert int(reach.domains[level]) == most_domains(layout.groups(kind), domains[:, level])


def test_piper_keeps_pipelines_near_and_data_parallelism_far():
    platform = load_platform("frontier")
    layout = ParallelLayout(world=2048, pp=4, ep=32)
    sizes = sizes_of(layout)
    group = [level.name for level in platform.levels].index("group")
    near = members_at_levels(platform, sizes, "pp", "piper")
    far = members_at_levels(platform, sizes, "pp")
    assert (near.domains[group], far.domains[group]) == (1, 2)
    assert members_at_levels(platform, sizes, "edp", "piper").domains[group] == 2


def test_many_layouts_at_once_equal_each_alone():
    platform = machine(8, 4)
    grids = [
        {"tp": tp, "pp": pp, "ep": ep} for tp in (1, 2, 4) for pp in (1, 2, 8) for ep in (1, 4, 16)
    ]
    rows = [sizes_of(ParallelLayout(world=512, **grid)) for grid in grids]
    together = Sizes(
        **{
            name: np.array([getattr(row, name) for row in rows])
            for name in ("world", "tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch")
        },
        global_batch=512,
        seq=1,
    )
    for kind in GROUPS:
        for order in ("megatron", "piper"):
            reach = members_at_levels(platform, together, kind, order)
            alone = [members_at_levels(platform, row, kind, order) for row in rows]
            for level, domains in enumerate(reach.domains):
                assert domains.tolist() == [int(each.domains[level]) for each in alone]


@pytest.mark.parametrize("order", ["megatron", "piper"])
def test_optimizer_instances_split_a_group_into_runs(order):
    platform = machine(8, 2)
    sizes = sizes_of(ParallelLayout(world=128, tp=2, pp=2))
    inside, across = instances_at_levels(platform, sizes, "dp", 4, order)
    assert (inside.members, across.members) == (8, 4)
    node = platform.node_level
    assert (inside.domains[node], across.domains[node]) == (2, 4)
