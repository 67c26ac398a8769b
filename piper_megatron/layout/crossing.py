"""What crosses the network: the level at which members of a group meet, and what that costs.

All functions take `domains` of *logical* ranks: int array [world, levels], innermost level first,
nested. The level at which two ranks meet is the number of levels at which they differ.
"""

from collections.abc import Sequence

import numpy as np

from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.traffic import Pattern, Traffic
from piper_megatron.platform.topology import Topology

# what reports speak of: an expert group of an ETP > 1 job is the whole tp-ep group
REPORTED_KINDS = ("tp", "cp", "tp_ep", "pp", "dp", "edp")


def bytes_by_level(
    layout: ParallelLayout, traffic: Traffic, topology: Topology, domains: np.ndarray
) -> list[float]:
    """Bytes per step (mean over ranks) that meet their receiver at each level, innermost first."""
    # plain floats: a vectorised product may round differently from one processor to another, and
    # every rank of a job must come to the same choice
    crossing = [0.0] * len(topology.levels)
    for kind, flow in traffic.flows.items():
        shares = meeting_shares(layout.groups(kind), flow.pattern, domains, topology.node_level)
        for level, share in enumerate(shares.tolist()):
            crossing[level] += flow.bytes_per_rank * share
    return crossing


def communication_seconds(crossing: Sequence[float], topology: Topology) -> float:
    """Cost of a placement: seconds per step that a rank sends, without any overlap.

    Args:
        crossing: `bytes_by_level`; each is divided by the bandwidth that a rank gets at the level.
        topology: whose levels they are.

    Returns:
        The sum, rounded to 12 digits, so that equal placements have equal costs.
    """
    levels = zip(crossing, topology.levels, strict=True)
    return float(f"{sum(sent / (level.gbps * 1e9) for sent, level in levels):.12g}")


def mean_reach(crossing: Sequence[float]) -> float:
    """Levels that a byte climbs to meet its receiver, rounded: what tells equal costs apart.

    Two levels may have one bandwidth, as chassis and group of a dragonfly do; a message that stays
    in the chassis still shares fewer links.
    """
    total = sum(crossing)
    climbed = sum(level * sent for level, sent in enumerate(crossing))
    return round(climbed / total, 6) if total else 0.0


def meeting_shares(
    groups: np.ndarray, pattern: Pattern, domains: np.ndarray, node_level: int
) -> np.ndarray:
    """Share of a pattern's bytes whose sender and receiver meet at each level.

    Args:
        groups: int array [groups, size > 1] of ranks in group order.
        pattern: who talks to whom.
        domains: int array [world, levels].
        node_level: index of the level `node`.

    Returns:
        float array [levels] with sum 1.
    """
    if pattern is Pattern.ALL_TO_ALL:
        return _all_to_all_shares(groups, domains)
    if pattern is Pattern.COLLECTIVE:
        groups = _nodes_side_by_side(groups, domains[:, node_level])
    receivers = groups[:, 1:] if pattern is Pattern.CHAIN else np.roll(groups, -1, axis=1)
    senders = groups[:, : receivers.shape[1]]
    meet = (domains[senders] != domains[receivers]).sum(axis=2)
    return np.bincount(meet.ravel(), minlength=domains.shape[1]) / meet.size


def _all_to_all_shares(groups: np.ndarray, domains: np.ndarray) -> np.ndarray:
    """From the number of members in each domain: n members make n (n - 1) ordered pairs."""
    count, size = groups.shape
    pairs_within = []
    for of_rank in domains.T:
        members = of_rank[groups] + np.arange(count)[:, None] * (of_rank.max() + 1)
        inside = np.unique(members, return_counts=True)[1]
        pairs_within.append(int((inside * (inside - 1)).sum()))
    return np.diff(pairs_within, prepend=0) / (count * size * (size - 1))


def _nodes_side_by_side(groups: np.ndarray, node_of_rank: np.ndarray) -> np.ndarray:
    """Reorders every group: members of one node together, nodes in order of their first member."""
    node = node_of_rank[groups]
    by_node = np.argsort(node, axis=1, kind="stable")
    node = np.take_along_axis(node, by_node, axis=1)
    starts = np.ones_like(node, dtype=bool)
    starts[:, 1:] = node[:, 1:] != node[:, :-1]
    run_start = np.maximum.accumulate(np.where(starts, np.arange(node.shape[1]), 0), axis=1)
    first_member = np.take_along_axis(by_node, run_start, axis=1)
    by_first = np.argsort(first_member, axis=1, kind="stable")
    return np.take_along_axis(groups, np.take_along_axis(by_node, by_first, axis=1), axis=1)


def crossing_shares(
    layout: ParallelLayout, topology: Topology, domains: np.ndarray
) -> dict[str, dict[str, float]]:
    """How many groups leave a domain.

    Returns:
        Kind of group (of `REPORTED_KINDS`, with more than one member) -> level name -> share of
        that kind's groups which are not whole inside one domain of the level. The outermost level,
        which holds everything, is left out.
    """
    shares = {}
    for kind in REPORTED_KINDS:
        if layout.group_size(kind) > 1:
            members = domains[layout.groups(kind)]
            leaves = (members != members[:, :1]).any(axis=1).mean(axis=0)
            shares[kind] = {
                level.name: float(share)
                for level, share in zip(topology.levels[:-1], leaves[:-1], strict=True)
            }
    return shares
