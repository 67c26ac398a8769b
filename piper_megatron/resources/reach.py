"""How far groups reach: the domains of every network level that a group's members lie in.

The arithmetic counterpart of `layout.crossing`, for nodes that are filled one after another in
network order. Sizes may be arrays [layouts].

Every group of Megatron's rank order is a *comb*: members `stride` ranks apart, in blocks of
`stride * members` ranks that start at multiples of it. Under Piper's placement the data-parallel
groups are combs of combs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from piper_megatron.layout.grid import GROUPS
from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.platform.platform import Platform

Order = Literal["megatron", "piper"]


@dataclass(frozen=True)
class Reach:
    """How a group's members spread over nested levels, in the group that touches most domains.

    Attributes:
        members: of a group.
        domains: for each level, innermost first, the number of its domains that hold members; 1 for
            the outermost.
    """

    members: Number
    domains: tuple[Number, ...]

    def inside(self, level: int) -> Number:
        """Members in one domain of a level, taking the members as evenly spread."""
        return self.members / self.domains[level]

    def leaving_all_to_all(self) -> tuple[Number, ...]:
        """Share of an all-to-all's messages that meet at each level or beyond it."""
        pairs = np.maximum(self.members - 1, 1)
        met = [np.zeros_like(self.members), *(self.inside(i) - 1 for i in range(len(self.domains)))]
        return tuple((self.members - 1 - within) / pairs for within in met[:-1])

    def leaving_ring(self) -> tuple[Number, ...]:
        """The same for a ring in which members of one domain stand side by side.

        A ring over d domains crosses d of their borders, and none where there is only one.
        """
        crossings = [self.members, *self.domains[:-1]]
        return tuple(
            np.where(np.greater(count, 1), count / np.maximum(self.members, 1), 0.0)
            for count in crossings
        )


def domain_sizes(platform: Platform) -> tuple[int | None, ...]:
    """Ranks that a job has in each domain of a level; None where it holds the whole job.

    A level between the node and the outermost whose size is not known is taken as large as the
    level inside it, so that nothing is assumed to be near.
    """
    sizes: list[int | None] = []
    for i, level in enumerate(platform.levels):
        if i == len(platform.levels) - 1:
            sizes.append(None)
        elif i < platform.node_level:
            sizes.append(level.ranks)
        elif i == platform.node_level:
            sizes.append(platform.ranks_per_node)
        else:
            nodes = level.segment or level.nodes
            sizes.append(nodes * platform.ranks_per_node if nodes else sizes[-1])
    return tuple(sizes)


def members_at_levels(
    platform: Platform, sizes: Sizes, kind: str, order: Order = "megatron"
) -> Reach:
    """How the groups of a kind spread.

    Args:
        platform: gives the levels and their sizes.
        sizes: of one or many layouts.
        kind: a key of `layout.grid.GROUPS`.
        order: of the ranks on the devices: Megatron's own, or replicas of pipeline x expert
            parallelism packed together (docs/architecture.md, "The placement").
    """
    return _reach(platform, sizes, _combs(platform, sizes, kind, order))


def instances_at_levels(
    platform: Platform, sizes: Sizes, kind: str, instances: int, order: Order = "megatron"
) -> tuple[Reach, Reach]:
    """How a group's optimizer instances spread, which are runs of its members.

    megatron/core/parallel_state.py:create_hierarchical_groups (0.19.2).

    Returns:
        The members of one instance, and those with one place in all instances.
    """
    inside, across = [], []
    combs = _combs(platform, sizes, kind, order)
    left = _members(combs) // instances
    for comb in combs:
        members = np.minimum(comb.members, left)
        inside.append(_Comb(comb.stride, members))
        across.append(_Comb(comb.stride * members, comb.members // members))
        left = left // members
    return _reach(platform, sizes, inside), _reach(platform, sizes, across)


@dataclass(frozen=True)
class _Comb:
    """Members `stride` ranks apart in blocks of `stride * members` ranks."""

    stride: Number
    members: Number

    def domains(self, size: int, world: Number) -> Number:
        """Domains of `size` ranks that a block reaches into at most."""
        block = self.stride * self.members
        furthest_start = np.minimum(size - np.gcd(block, size), world - block)
        return np.minimum(-(-(furthest_start + block) // size), self.members)


def _reach(platform: Platform, sizes: Sizes, combs: Sequence[_Comb]) -> Reach:
    members = _members(combs)
    domains = []
    for level, size in zip(platform.levels, domain_sizes(platform), strict=True):
        touched: Number = np.ones_like(members)
        if size is not None:
            for comb in combs:
                touched = touched * comb.domains(size, sizes.world)
        if level.segment and level.nodes:
            # a job that one full domain can hold is not cut into segments
            alone = np.less_equal(sizes.world, level.nodes * platform.ranks_per_node)
            touched = np.where(alone, 1, touched)
        domains.append(np.minimum(touched, members))
    return Reach(members, tuple(domains))


def _members(combs: Sequence[_Comb]) -> Number:
    members: Number = 1
    for comb in combs:
        members = members * comb.members
    return members


def _combs(platform: Platform, sizes: Sizes, kind: str, order: Order) -> list[_Comb]:
    """Innermost first; the product of their members is the group's size."""
    axes, inside = GROUPS[kind]
    stride: Number = 1
    members: Number = 1
    for axis in axes[axes.index(inside[-1]) + 1 :]:
        stride = stride * getattr(sizes, axis)
    for axis in inside:
        members = members * getattr(sizes, axis)
    if order == "megatron" or kind not in ("pp", "dp", "edp"):
        return [_Comb(stride, members)]
    stage = sizes.world // sizes.pp
    cell = _cell(platform, sizes)
    if kind == "pp":
        return [_Comb(cell, members)]
    # replicas, each a cell of every stage, stand side by side
    return [_Comb(stride, cell // stride), _Comb(cell * sizes.pp, stage // cell)]


def _cell(platform: Platform, sizes: Sizes) -> Number:
    """Ranks of whole expert groups and whole nodes; a whole stage where those do not divide it."""
    bundle = np.lcm(sizes.tp * sizes.cp, sizes.etp * sizes.ep)
    cell = np.lcm(bundle, platform.ranks_per_node)
    stage = sizes.world // sizes.pp
    return np.where(stage % cell == 0, cell, stage)
