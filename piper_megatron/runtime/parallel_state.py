"""The parallel-state initializer: physical ranks become logical ranks, then groups are added.

Before `init_process_group` all ranks learn where each of them runs, compute the same placement, and
take their logical rank. Megatron then builds its own groups in its own order. Afterwards every
expert group gets the node groups and rail groups of its true nodes.
"""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from piper_megatron.errors import LayoutError, PiperError
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.placement import POLICIES, Placement, place, read_placement_file
from piper_megatron.layout.traffic import traffic_of
from piper_megatron.platform.discovery import (
    JobObservation,
    NodeObservation,
    observe_job,
    observe_node,
    resolve_topology,
)
from piper_megatron.platform.topology import Location, Topology
from piper_megatron.report.grid_map import render_grid_map
from piper_megatron.runtime.arguments import layout_of, uses_piper
from piper_megatron.runtime.rendezvous import agree, comparable, job_store, same_as_rank_0
from piper_megatron.runtime.workload import workload_of


@dataclass(frozen=True)
class ExpertGroups:
    """Sub-groups of this rank's expert group (tp-ep group when ETP > 1) along its true nodes.

    Attributes:
        node: members of the expert group on this rank's node, in group order.
        rail: members with this rank's index on their node, one per node, in group order.
    """

    node: dist.ProcessGroup
    rail: dist.ProcessGroup


@dataclass(frozen=True)
class PlacedJob:
    """Where this job runs.

    Attributes:
        layout: parallel sizes.
        topology: nodes and network levels.
        locations: location of each *logical* rank.
        placement: the renumbering in force.
        store: the rendezvous store, hosted by the launcher's rank 0 wherever that now is.
    """

    layout: ParallelLayout
    topology: Topology
    locations: tuple[Location, ...]
    placement: Placement
    store: dist.Store


_job: PlacedJob | None = None
_expert_groups: ExpertGroups | None = None


def placed_job() -> PlacedJob | None:
    """The job's placement; None when no `--piper-*` flag is in force."""
    return _job


def expert_groups() -> ExpertGroups | None:
    """Node and rail group of this rank; None without a `--piper-*` flag or on unequal shares."""
    return _expert_groups


def place_ranks(args: argparse.Namespace) -> argparse.Namespace:
    """Gives this process its logical rank: sets `args.rank` and the RANK variable.

    Collective over the launcher's ranks through the store. Does nothing without a `--piper-*` flag
    or under Megatron's fake process group.

    Raises:
        PiperError: ranks disagree, the topology does not cover a node, or a feature in the command
            relies on the launcher's rank order.
    """
    global _job
    if not uses_piper(args) or getattr(args, "fake_process_group", False):
        return args
    layout = layout_of(args)
    if _job is not None:
        return _already_placed(args, layout)
    _refuse_own_renumbering(args)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    store = job_store(args.rank, args.world_size, timeout)
    physical, topology = _locate(args, store, timeout)
    placement = _placement(args, layout, topology, physical)
    same_as_rank_0(store, args.rank, placement.logical_of_physical, timeout)
    _refuse_flex(args, placement)
    _job = PlacedJob(
        layout=layout,
        topology=topology,
        locations=tuple(physical[p] for p in placement.physical_of_logical),
        placement=placement,
        store=store,
    )
    args.rank = int(placement.logical_of_physical[args.rank])
    os.environ["RANK"] = str(args.rank)
    if args.rank == 0:
        print(render_grid_map(layout, topology, physical, placement, width=120), flush=True)
    return args


def _locate(
    args: argparse.Namespace, store: dist.Store, timeout: timedelta
) -> tuple[list[Location], Topology]:
    """Where each launcher rank runs, and the network around them; the same on all ranks."""
    node = observe_node()
    local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank or 0))
    agreement = agree(
        store,
        args.rank,
        args.world_size,
        {"host": node.host, "local_rank": local_rank, "node": node.to_json()},
        comparable(args),
        observe_job().to_json() if args.rank == 0 else {},
        timeout,
    )
    topology = resolve_topology(
        args.piper_topology or "auto",
        [NodeObservation.from_json(report["node"]) for report in agreement.reports],
        JobObservation.from_json(agreement.job),
    )
    return [Location(r["host"], r["local_rank"]) for r in agreement.reports], topology


def _already_placed(args: argparse.Namespace, layout: ParallelLayout) -> argparse.Namespace:
    assert _job is not None
    if layout != _job.layout:
        raise LayoutError(
            f"ranks were placed for {asdict(_job.layout)}, now the job asks for {asdict(layout)}; "
            "parallel sizes cannot change inside a process"
        )
    args.rank = int(os.environ["RANK"])
    return args


def _placement(
    args: argparse.Namespace,
    layout: ParallelLayout,
    topology: Topology,
    physical: Sequence[Location],
) -> Placement:
    policy = args.piper_placement or "none"
    traffic = traffic_of(layout, workload_of(args))
    if policy in POLICIES:
        return place(layout, topology, physical, traffic, policy)
    return read_placement_file(policy, layout, topology, physical, traffic)


def _refuse_own_renumbering(args: argparse.Namespace) -> None:
    if getattr(args, "inprocess_restart", False):
        raise PiperError(
            "--inprocess-restart numbers the ranks itself; remove it or the --piper-* flags"
        )


def _refuse_flex(args: argparse.Namespace, placement: Placement) -> None:
    if not placement.contiguous and args.moe_token_dispatcher_type == "flex":
        raise PiperError(
            f"--moe-token-dispatcher-type flex: {placement.notes[-1]}; use alltoall, or equal "
            "numbers of ranks on all nodes with --piper-placement auto"
        )


def node_and_rail_ranks(
    members: Sequence[int], hosts: Sequence[str]
) -> tuple[list[list[int]], list[list[int]]] | None:
    """Splits an expert group along its nodes.

    Args:
        members: logical ranks of the group, in group order.
        hosts: host of every logical rank.

    Returns:
        (node groups, rail groups), or None when the nodes hold unequal shares of the group.
    """
    by_host: dict[str, list[int]] = {}
    for rank in members:
        by_host.setdefault(hosts[rank], []).append(rank)
    if len(Counter(map(len, by_host.values()))) != 1:
        return None
    nodes = list(by_host.values())
    return nodes, [list(rail) for rail in zip(*nodes, strict=True)]


def build_expert_groups(timeout: timedelta) -> ExpertGroups | None:
    """Creates node and rail groups of every expert group, in the same order on all ranks.

    Args:
        timeout: of the job; an unset one would fall back to torch's default.
    """
    global _expert_groups
    if _job is None:
        return None
    hosts = [location.host for location in _job.locations]
    splits = [node_and_rail_ranks(g.tolist(), hosts) for g in _job.layout.groups("tp_ep")]
    if any(split is None for split in splits):
        _expert_groups = None
        return None
    node = _my_group([ranks for s in splits if s for ranks in s[0]], "EXPERT_NODE_GROUP", timeout)
    rail = _my_group([ranks for s in splits if s for ranks in s[1]], "EXPERT_RAIL_GROUP", timeout)
    _expert_groups = ExpertGroups(node=node, rail=rail)
    return _expert_groups


def _my_group(groups: list[list[int]], name: str, timeout: timedelta) -> dist.ProcessGroup:
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout, group_desc=name)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None, "every rank is in one group of each kind"
    return mine
