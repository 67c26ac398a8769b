"""Placement: which device plays which logical rank.

Megatron numbers ranks "tp-cp-ep-dp-pp" and builds every group from these numbers. Piper leaves the
logical order alone and renumbers the devices, so that in this order of importance

    tensor-parallel groups stay inside a node,
    expert groups stay whole inside the smallest network level that can hold them,
    the pipeline neighbours of a replica sit next to each other,
    data parallelism, which talks once per step, reaches furthest.

Some orders of nodes are tried and the cheapest by `communication_seconds` wins; the launcher's own
order is always among them. While nodes hold equal numbers of ranks, each keeps a contiguous block
of logical ranks in LOCAL_RANK order, because code around Megatron infers the node of a rank from
`rank // local_size`.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from pathlib import Path

import numpy as np
import yaml

from piper_megatron.errors import PlacementError
from piper_megatron.layout.crossing import bytes_by_level, communication_seconds, mean_reach
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.packing import merge_domains, pack, tree_order
from piper_megatron.layout.traffic import Traffic
from piper_megatron.platform.topology import Location, Topology

POLICIES = ("auto", "block", "none")

LAUNCHER = "launcher's order"
KEPT = "launcher's order, which no other that was tried beats"
TREE = "nodes in network order"
PIPELINE_FIRST = "expert groups packed, then pipelines, then data parallelism"
DATA_FIRST = "expert groups packed, then data parallelism, then pipelines"
FROM_FILE = "placement file"


@dataclass(frozen=True, eq=False)
class Placement:
    """A renumbering of the devices and what it is worth.

    Attributes:
        logical_of_physical: int64 array [world]; the logical rank that each launcher rank plays.
        order: the order that was chosen, in words.
        cost_before_s, cost_after_s: `communication_seconds` under the launcher's order and under
            this one.
        cost_model: whose sizes the costs are computed from.
        contiguous: every node holds equally many ranks, as a contiguous block of logical ranks in
            LOCAL_RANK order; then `rank // local_size` names the node.
        notes: what the user should know, a sentence each.
    """

    logical_of_physical: np.ndarray
    order: str
    cost_before_s: float
    cost_after_s: float
    cost_model: str
    contiguous: bool
    notes: tuple[str, ...] = ()

    @cached_property
    def physical_of_logical(self) -> np.ndarray:
        """int64 array [world]; the launcher rank that plays each logical rank."""
        return np.argsort(self.logical_of_physical)


def place(
    layout: ParallelLayout,
    topology: Topology,
    locations: Sequence[Location],
    traffic: Traffic,
    policy: str = "auto",
) -> Placement:
    """Chooses the placement of a job.

    Args:
        layout: parallel sizes.
        topology: nodes and network levels.
        locations: where each launcher rank runs.
        traffic: bytes per step, the weights of the cost.
        policy: `auto` takes the cheapest order, `block` the nodes one after another in network
            order, `none` the launcher's order. No policy returns a placement that costs more than
            the launcher's order.

    Raises:
        PlacementError: an unknown policy, or locations that are not one for each rank.
        TopologyError: the topology does not cover the locations.
    """
    if policy not in POLICIES:
        raise PlacementError(f"placement '{policy}' is none of {', '.join(POLICIES)}")
    job = _Job(layout, topology, locations, traffic)
    orders = {LAUNCHER: np.arange(layout.world)}
    if policy != "none":
        orders |= _orders(job, packed=policy == "auto")
    crossing = {name: job.crossing(order) for name, order in orders.items()}
    costs = {name: communication_seconds(crossing[name], topology) for name in orders}
    affordable = [name for name in orders if costs[name] <= costs[LAUNCHER]]

    def preference(name: str) -> tuple[float, float, bool]:
        # a difference beyond the third digit is no reason to renumber
        cost = float(f"{costs[name]:.3g}")
        return cost, mean_reach(crossing[name]), not job.contiguous(orders[name])

    chosen = min(affordable, key=preference)
    words = KEPT if chosen == LAUNCHER and policy != "none" else chosen
    return job.placement(orders[chosen], words, costs[LAUNCHER], costs[chosen])


class _Job:
    """What all candidate orders share. An order is `physical_of_logical`."""

    def __init__(
        self,
        layout: ParallelLayout,
        topology: Topology,
        locations: Sequence[Location],
        traffic: Traffic,
    ) -> None:
        if len(locations) != layout.world:
            raise PlacementError(f"{len(locations)} locations for a world of {layout.world} ranks")
        self.layout = layout
        self.topology = topology
        self.traffic = traffic
        self.domains = topology.domains(locations)
        self.node = self.domains[:, topology.node_level]
        self.local_rank = np.array([location.local_rank for location in locations])
        self.ranks_of_node = np.bincount(self.node)
        # set when all nodes hold equally many ranks
        sizes = set(self.ranks_of_node.tolist())
        self.node_size: int | None = sizes.pop() if len(sizes) == 1 else None

    def crossing(self, order: np.ndarray) -> list[float]:
        return bytes_by_level(self.layout, self.traffic, self.topology, self.domains[order])

    def cost(self, order: np.ndarray) -> float:
        return communication_seconds(self.crossing(order), self.topology)

    def contiguous(self, order: np.ndarray) -> bool:
        if self.node_size is None:
            return False
        node = self.node[order].reshape(-1, self.node_size)
        local_rank = self.local_rank[order].reshape(-1, self.node_size)
        return bool((node == node[:, :1]).all() and (np.diff(local_rank, axis=1) > 0).all())

    def placement(
        self, order: np.ndarray, words: str, cost_before_s: float, cost_after_s: float
    ) -> Placement:
        contiguous = self.contiguous(order)
        return Placement(
            logical_of_physical=np.argsort(order),
            order=words,
            cost_before_s=cost_before_s,
            cost_after_s=cost_after_s,
            cost_model=self.traffic.model,
            contiguous=contiguous,
            notes=() if contiguous else (self._why_not_contiguous(),),
        )

    def _why_not_contiguous(self) -> str:
        if self.node_size is None:
            counts = sorted(Counter(self.ranks_of_node.tolist()).items(), reverse=True)
            why = "nodes hold unequal numbers of ranks (" + ", ".join(
                f"{nodes} with {ranks}" for ranks, nodes in counts
            )
            why += ")"
        else:
            why = "this order does not number each node's ranks one after another"
        return (
            f"{why}: what takes rank // local size for the node goes wrong here, "
            "so the flex dispatcher is refused"
        )


def _orders(job: _Job, packed: bool) -> dict[str, np.ndarray]:
    """Candidate orders by name: int64 arrays [world] of physical ranks in logical order."""
    in_tree = tree_order(
        np.column_stack([job.local_rank, job.domains[:, job.topology.node_level :]])
    )
    orders = {TREE: in_tree}
    if not packed:
        return orders
    cells = _cells(job, in_tree)
    if cells is None:
        return orders
    ranks, domains = cells
    pipelines = pack(domains, job.layout.pp)
    stages = pack(domains, len(ranks) // job.layout.pp)
    orders[PIPELINE_FIRST] = ranks[pipelines.T].reshape(-1)
    orders[DATA_FIRST] = ranks[stages].reshape(-1)
    return orders


def _cells(job: _Job, in_tree: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Packs ranks into the smallest blocks that hold whole expert groups (and whole nodes).

    Returns:
        int64 arrays [cells, ranks in a cell] of physical ranks and [cells, levels] of domains; or
        None when pipeline stages end inside nodes, where only the order of the nodes is free.
    """
    layout = job.layout
    bundle = lcm(layout.tp * layout.cp, layout.etp * layout.ep)
    if job.node_size is None:
        ranks = in_tree[:, None]
        sizes = [layout.tp, layout.etp, layout.tp * layout.cp, layout.etp * layout.ep, bundle]
    else:
        ranks = in_tree.reshape(-1, job.node_size)
        sizes = [lcm(bundle, job.node_size)]
        if layout.world // layout.pp % sizes[-1]:
            return None
    domains = job.domains[ranks[:, 0], job.topology.node_level :]
    for size in sorted(sizes):
        k, rest = divmod(size, ranks.shape[1])
        if rest == 0:
            groups = pack(domains, k)
            ranks, domains = ranks[groups].reshape(-1, size), merge_domains(domains, groups)
    return ranks, domains


def read_placement_file(
    path: str | Path,
    layout: ParallelLayout,
    topology: Topology,
    locations: Sequence[Location],
    traffic: Traffic,
) -> Placement:
    """Reads the placement that a file prescribes, whatever it costs.

    The file is YAML or JSON: host -> logical ranks by ascending local rank.

    Raises:
        PlacementError: the file cannot be read or does not fit the job; names the host or rank.
    """
    job = _Job(layout, topology, locations, traffic)
    ranks_of_host = _load(Path(path))
    launcher_ranks: dict[str, list[int]] = {}
    for rank in np.argsort(job.local_rank, kind="stable").tolist():
        launcher_ranks.setdefault(locations[rank].host, []).append(rank)
    for host, ranks in ranks_of_host.items():
        if host not in launcher_ranks:
            raise PlacementError(f"placement {path}: host {host} is not in the job; remove it")
        if len(ranks) != len(launcher_ranks[host]):
            raise PlacementError(
                f"placement {path}: host {host} has {len(ranks)} ranks, "
                f"the job runs {len(launcher_ranks[host])} there"
            )
    missing = sorted(launcher_ranks.keys() - ranks_of_host.keys())
    if missing:
        raise PlacementError(f"placement {path}: host {missing[0]} of the job is missing; add it")
    owner: dict[int, str] = {}
    for host, ranks in ranks_of_host.items():
        for rank in ranks:
            if not 0 <= rank < layout.world:
                raise PlacementError(
                    f"placement {path}: rank {rank} of host {host} is outside 0..{layout.world - 1}"
                )
            if rank in owner:
                raise PlacementError(
                    f"placement {path}: rank {rank} is given twice, "
                    f"to host {owner[rank]} and to host {host}"
                )
            owner[rank] = host
    order = np.empty(layout.world, dtype=np.int64)
    for host, ranks in ranks_of_host.items():
        order[ranks] = launcher_ranks[host]
    return job.placement(order, FROM_FILE, job.cost(np.arange(layout.world)), job.cost(order))


def _load(path: Path) -> dict[str, list[int]]:
    try:
        text = path.read_text(encoding="utf-8")
        # the C loader where PyYAML has it: a file for 75,000 ranks takes the other one seconds
        content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise PlacementError(
            f"placement '{path}' is none of {', '.join(POLICIES)} and no readable file: "
            f"{error.strerror}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise PlacementError(f"placement {path} is neither YAML nor JSON: {problem}") from error
    if not isinstance(content, dict) or not content:
        raise PlacementError(f"placement {path} must map each host to its list of logical ranks")
    for host, ranks in content.items():
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            raise PlacementError(
                f"placement {path}: host {host} needs a list of whole numbers, got {ranks!r}"
            )
    return {str(host): ranks for host, ranks in content.items()}


def write_placement_file(
    path: str | Path, locations: Sequence[Location], placement: Placement
) -> None:
    """Writes a placement so that `read_placement_file` reads it back; JSON if the name says so.

    Raises:
        PlacementError: the file cannot be written.
    """
    ranks_of_host = logical_ranks_of_hosts(locations, placement)
    lines = [f"{json.dumps(host)}: {ranks}" for host, ranks in ranks_of_host.items()]
    if Path(path).suffix == ".json":
        text = "{\n  " + ",\n  ".join(lines) + "\n}\n"
    else:
        text = "# host: logical ranks by local rank\n" + "\n".join(lines) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlacementError(f"cannot write placement {path}: {error.strerror}") from error


def logical_ranks_of_hosts(
    locations: Sequence[Location], placement: Placement
) -> dict[str, list[int]]:
    """Host -> logical ranks by ascending local rank; hosts by their lowest logical rank."""
    ranks_of_host: dict[str, list[int]] = {
        locations[physical].host: [] for physical in placement.physical_of_logical
    }
    for physical in np.argsort([location.local_rank for location in locations], kind="stable"):
        logical = int(placement.logical_of_physical[physical])
        ranks_of_host[locations[physical].host].append(logical)
    return ranks_of_host
