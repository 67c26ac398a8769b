"""The parallel-state initializer: physical ranks become logical ranks, then groups are added.

Before `init_process_group` all ranks learn where each of them runs, compute the same placement, and
take their logical rank. Megatron then builds its own groups in its own order. Afterwards every
expert group gets the node groups and rail groups of its nodes.
"""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from piper_megatron.errors import LayoutError, PiperError
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.placement import POLICIES, Placement, place, read_placement_file
from piper_megatron.layout.traffic import traffic_of
from piper_megatron.platform.discovery import (
    JobObservation,
    NodeObservation,
    known_platform,
    observe_job,
    observe_node,
    resolve_topology,
)
from piper_megatron.platform.job_platform import platform_of_job
from piper_megatron.platform.platform import Platform
from piper_megatron.platform.topology import Location, Topology
from piper_megatron.report.grid_map import render_grid_map
from piper_megatron.runtime.arguments import layout_of, uses_piper
from piper_megatron.runtime.dispatch.groups import (
    ExpertGroups,
    equal_shares,
    members_by_node,
    split_group,
)
from piper_megatron.runtime.rendezvous import agree, comparable, job_store, same_as_rank_0
from piper_megatron.runtime.workload import workload_of
from piper_megatron.workload.dispatcher_flags import TWO_HOPS, dispatcher_flags


@dataclass(frozen=True)
class PlacedJob:
    """Where this job runs.

    Attributes:
        layout: parallel sizes.
        topology: nodes and network levels.
        platform: what is known of the machine.
        locations: location of each *logical* rank.
        placement: the renumbering in force.
        store: the rendezvous store, hosted by the launcher's rank 0 wherever that now is.
        expert_nodes: the node of each logical rank, pretended ones with `--piper-node-size`.
    """

    layout: ParallelLayout
    topology: Topology
    platform: Platform
    locations: tuple[Location, ...]
    placement: Placement
    store: dist.Store
    expert_nodes: tuple[str, ...]


_job: PlacedJob | None = None
_expert_groups: ExpertGroups | None = None


def placed_job() -> PlacedJob | None:
    """The job's placement; None when no `--piper-*` flag is in force."""
    return _job


def expert_groups() -> ExpertGroups | None:
    """Groups of this rank's expert group; None without a `--piper-*` flag."""
    return _expert_groups


def place_ranks(args: argparse.Namespace) -> argparse.Namespace:
    """Gives this process its logical rank: sets `args.rank` and the RANK variable.

    Collective over the launcher's ranks through the store. Does nothing without a `--piper-*` flag
    or under Megatron's fake process group.

    Raises:
        PiperError: ranks disagree, the topology does not cover a node, a feature in the command
            relies on the launcher's rank order, or expert groups do not split into nodes as asked.
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
    physical, topology, platform = _locate(args, store, timeout)
    placement = _placement(args, layout, topology, physical)
    locations = tuple(physical[p] for p in placement.physical_of_logical)
    # before the last word with rank 0, which takes the store with it when it stops
    _refuse_flex(args, placement)
    nodes = _expert_nodes(args, layout, [location.host for location in locations])
    same_as_rank_0(store, args.rank, placement.logical_of_physical, timeout)
    _job = PlacedJob(
        layout=layout,
        topology=topology,
        platform=platform,
        locations=locations,
        placement=placement,
        store=store,
        expert_nodes=nodes,
    )
    args.rank = int(placement.logical_of_physical[args.rank])
    os.environ["RANK"] = str(args.rank)
    if args.rank == 0:
        print(render_grid_map(layout, topology, physical, placement, width=120), flush=True)
    return args


def _locate(
    args: argparse.Namespace, store: dist.Store, timeout: timedelta
) -> tuple[list[Location], Topology, Platform]:
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
    source, job = args.piper_topology or "auto", JobObservation.from_json(agreement.job)
    topology = resolve_topology(
        source, [NodeObservation.from_json(report["node"]) for report in agreement.reports], job
    )
    locations = [Location(r["host"], r["local_rank"]) for r in agreement.reports]
    known = known_platform(source, topology, job)
    return locations, topology, platform_of_job(topology, locations, known)


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


def _expert_nodes(
    args: argparse.Namespace, layout: ParallelLayout, hosts: Sequence[str]
) -> tuple[str, ...]:
    flags = dispatcher_flags(args)
    nodes = nodes_of_ranks(layout, hosts, flags.node_size)
    if flags.algorithm in TWO_HOPS:
        _refuse_unequal_shares(flags.algorithm, layout, nodes)
    return nodes


def nodes_of_ranks(
    layout: ParallelLayout, hosts: Sequence[str], node_size: int | None
) -> tuple[str, ...]:
    """The node of each logical rank, as expert groups are split.

    Args:
        layout: parallel sizes.
        hosts: of every logical rank.
        node_size: members of an expert group that make a node (`--piper-node-size`); None for the
            true nodes.

    Raises:
        LayoutError: such a part spans two true nodes.
    """
    if node_size is None:
        return tuple(hosts)
    nodes = list(hosts)
    for group in layout.groups("ep").reshape(-1, layout.ep // node_size, node_size).tolist():
        for number, part in enumerate(group):
            spanned = list(dict.fromkeys(hosts[rank] for rank in part))
            if len(spanned) > 1:
                raise LayoutError(
                    f"--piper-node-size {node_size} takes ranks {part[0]} to {part[-1]} of an "
                    f"expert group for one node, and they run on {' and '.join(spanned[:2])}; give "
                    "a divisor of the group's members on each node, or add --piper-placement auto"
                )
            for rank in part:
                nodes[rank] = f"part {number} of {hosts[rank]}"
    return tuple(nodes)


def _refuse_unequal_shares(algorithm: str, layout: ParallelLayout, nodes: Sequence[str]) -> None:
    for group in layout.groups("tp_ep"):
        if _lie_alike(layout, group, nodes):
            continue
        on_nodes = Counter(nodes[rank] for rank in group)
        shares = ", ".join(f"{count} on {node}" for node, count in on_nodes.items())
        raise LayoutError(
            f"--piper-dispatcher {algorithm} needs nodes that hold equally many ranks of an "
            f"expert group, and ranks {group[0]} to {group[-1]} are {shares}; use "
            "--piper-dispatcher auto or flat, or --piper-placement auto"
        )


def _lie_alike(layout: ParallelLayout, tp_ep: np.ndarray, nodes: Sequence[str]) -> bool:
    """Whether the expert groups of a tp-ep group are spread alike, in equal shares.

    They exchange counts with each other.
    """
    expert_groups = tp_ep.reshape(layout.ep, layout.etp).T.tolist()
    splits = {members_by_node([nodes[rank] for rank in group]) for group in expert_groups}
    return len(splits) == 1 and all(map(equal_shares, splits))


def build_expert_groups(timeout: timedelta) -> ExpertGroups | None:
    """Creates node and rail groups of this rank's expert group; collective over all ranks.

    Args:
        timeout: of the job.
    """
    global _expert_groups
    if _job is None:
        return None
    ep = mpu.get_expert_model_parallel_group()
    nodes = [_job.expert_nodes[rank] for rank in dist.get_process_group_ranks(ep)]
    tp_ep = next(group for group in _job.layout.groups("tp_ep") if dist.get_rank() in group)
    if _lie_alike(_job.layout, tp_ep, _job.expert_nodes):
        _expert_groups = split_group(ep, nodes, timeout)
    else:
        _expert_groups = ExpertGroups(ep, members_by_node(nodes))
    return _expert_groups
