"""An expert group on its nodes: who sits beside whom, and the groups of each hop."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import chain

import torch.distributed as dist


@dataclass(frozen=True)
class ExpertGroups:
    """An expert group of M nodes with g members on each.

    Attributes:
        ep: the expert group.
        members: [M][g] ranks within `ep`.
        node: members on this rank's node, in group order; None when nodes hold unequal shares.
        rail: members with this rank's index on their node, one per node; None likewise.
    """

    ep: dist.ProcessGroup
    members: tuple[tuple[int, ...], ...]
    node: dist.ProcessGroup | None = None
    rail: dist.ProcessGroup | None = None

    @property
    def nodes(self) -> int:
        """Number of nodes, M."""
        return len(self.members)

    @property
    def per_node(self) -> int:
        """Members on a node, g."""
        return len(self.members[0])

    @cached_property
    def node_index(self) -> int:
        """Row of this rank in `members`."""
        return next(i for i, node in enumerate(self.members) if self.ep.rank() in node)

    @cached_property
    def local_index(self) -> int:
        """Column of this rank in `members`."""
        return self.members[self.node_index].index(self.ep.rank())

    @cached_property
    def rail_ranks(self) -> tuple[int, ...]:
        """[M] rank within `rail` of its member on each node: torch sorts the ranks of a group."""
        rail = [node[self.local_index] for node in self.members]
        return tuple(map(sorted(rail).index, rail))

    @cached_property
    def flat_members(self) -> tuple[int, ...]:
        """[M g] ranks within `ep`, node by node."""
        return tuple(chain.from_iterable(self.members))


def members_by_node(hosts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Members of a group, node by node in order of appearance.

    Args:
        hosts: of every member, in group order.
    """
    by_host: dict[str, list[int]] = {}
    for member, host in enumerate(hosts):
        by_host.setdefault(host, []).append(member)
    return tuple(map(tuple, by_host.values()))


def equal_shares(members: tuple[tuple[int, ...], ...]) -> bool:
    """Whether all nodes hold equally many members."""
    return len(set(map(len, members))) == 1


def split_group(ep: dist.ProcessGroup, hosts: Sequence[str], timeout: timedelta) -> ExpertGroups:
    """Makes the node groups and rail groups of one expert group; collective over its members.

    Args:
        ep: the expert group.
        hosts: of every member, in group order, in equal shares; the same on all members.
        timeout: of the job; an unset one would fall back to torch's default.
    """
    members = members_by_node(hosts)
    assert equal_shares(members)
    rails = list(zip(*members, strict=True))
    node = _own_part(ep, members, "EXPERT_NODE_GROUP", timeout)
    rail = _own_part(ep, rails, "EXPERT_RAIL_GROUP", timeout)
    for group in (node, rail, ep):
        # NCCL connects a group at its first call, which all members must make; a rank that has
        # nothing to send or receive would not
        dist.barrier(group)
    return ExpertGroups(ep, members, node, rail)


def _own_part(
    ep: dist.ProcessGroup, parts: Sequence[Sequence[int]], name: str, timeout: timedelta
) -> dist.ProcessGroup:
    world_ranks = dist.get_process_group_ranks(ep)
    mine = next(part for part in parts if ep.rank() in part)
    return dist.new_group(
        [world_ranks[member] for member in mine],
        timeout=timeout,
        use_local_synchronization=True,
        group_desc=name,
    )
