"""From what a job sees to a Topology.

| seen                          | where                        | tells                       |
|-------------------------------|------------------------------|-----------------------------|
| host name                     | every node                   | the node; some sites' group |
| xname                         | host name or /etc/cray/xname | cabinet and chassis         |
| SLURM_TOPOLOGY_ADDR, _PATTERN | every node, by slurmstepd    | switches or block           |
| scontrol show topology        | one process of the job       | switches or blocks          |
| PIPER_NVLINK_DOMAIN           | every node, by site's prolog | NVLink domain               |
| SLURM_CLUSTER_NAME, PBS_JOBID | one process of the job       | the platform                |

All functions are deterministic: ranks that hold the same observations get the same topology.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from piper_megatron.errors import TopologyError
from piper_megatron.platform.domains import DomainPaths, assemble, paths_of_one_word, xname_paths
from piper_megatron.platform.nodesets import describe, in_natural_order
from piper_megatron.platform.observation import (
    JobObservation,
    NodeObservation,
    observe_job,
    observe_node,
)
from piper_megatron.platform.platform import (
    Platform,
    is_path,
    is_platform_file,
    list_platforms,
    load_platform,
    topology_of_seen,
)
from piper_megatron.platform.slurm import Address, address_paths, parse_address, topology_paths
from piper_megatron.platform.topology import MACHINE, NODE, Level, Topology
from piper_megatron.platform.topology_file import read_topology

__all__ = [
    "JobObservation",
    "NodeObservation",
    "known_platform",
    "observe_job",
    "observe_node",
    "resolve_topology",
]

AUTO = "auto"
# Only the order matters to a placement that has nothing better to go by: NVLink or Infinity Fabric
# inside a node, one 200 Gb/s port per rank above it, and half as much at every further level.
_NODE_GBPS, _NETWORK_GBPS = 200.0, 25.0
_Seen = dict[str, dict[str, str]]


def resolve_topology(
    source: str, observations: Sequence[NodeObservation], job: JobObservation
) -> Topology:
    """The topology of a job.

    Args:
        source: `auto`, a platform's name, or the path of a topology file or platform file.
        observations: of the job's nodes, in any order; a node may report several times. When there
            are none, the nodes are those of the allocation.
        job: of one process, the same on all ranks.

    Returns:
        From a file, the whole file. Otherwise the job's nodes in natural order of their names.

    Raises:
        TopologyError: the file or platform cannot be used, a node is not in the file, or two
            machines have one host name.
    """
    nodes = _nodes(observations, job)
    if is_path(source) and not is_platform_file(source):
        return _checked(source, read_topology(source), nodes)
    nodes, notes = _without_copied_slurm_names(nodes)
    slurm = _slurm_domains(nodes, job)
    seen = _seen(nodes, slurm)
    if source == AUTO:
        return _auto(nodes, seen, slurm, job, notes)
    return topology_of_seen(load_platform(source), seen, notes)


def known_platform(source: str, topology: Topology, job: JobObservation) -> Platform | None:
    """The machine that a topology is of, where it is a known one.

    Args:
        source: as for `resolve_topology`.
        topology: what that returned.
        job: as for `resolve_topology`.
    """
    if source == AUTO:
        return _recognised([node.host for node in topology.nodes], job)[0]
    if is_path(source) and not is_platform_file(source):
        return None
    return load_platform(source)


def _nodes(
    observations: Sequence[NodeObservation], job: JobObservation
) -> dict[str, NodeObservation]:
    """One observation per host, in natural order of the hosts."""
    merged: dict[str, dict[str, str]] = {}
    for observation in observations or [NodeObservation(host=host) for host in job.hosts]:
        facts = merged.setdefault(observation.host, {})
        for name, value in observation:
            if value is not None and facts.setdefault(name, value) != value:
                raise TopologyError(
                    f"node {observation.host} reports twice: its {name} is {facts[name]} and "
                    f"{value}; host names must be unique"
                )
    if not merged:
        raise TopologyError("no node is known: run inside a job, or give host names")
    return {host: NodeObservation(**merged[host]) for host in in_natural_order(merged)}


def _checked(path: str, topology: Topology, nodes: Mapping[str, NodeObservation]) -> Topology:
    listed = {node.host for node in topology.nodes}
    missing = [host for host in nodes if host not in listed]
    if missing:
        raise TopologyError(
            f"{path} does not list {describe(missing)}; add it under 'nodes:' by its short name "
            "(hostname -s), or use auto"
        )
    return topology


def _without_copied_slurm_names(
    nodes: Mapping[str, NodeObservation],
) -> tuple[dict[str, NodeObservation], list[str]]:
    """Forgets what Slurm said of a node where it was said of another one.

    A launcher that hands its environment to other hosts (mpirun -x, ssh) gives them the address of
    the node it started on.
    """
    claims = {
        host: seen.slurm_node or (address.node if (address := _address(seen)) else None)
        for host, seen in nodes.items()
    }
    times = Counter(claims.values())
    copied = [host for host, name in claims.items() if name and times[name] > 1 and name != host]
    forget = dict.fromkeys(("slurm_node", "slurm_address", "slurm_pattern"))
    own = {host: nodes[host].model_copy(update=forget) for host in copied}
    notes = [f"{describe(copied)}: Slurm's variables are copies of another node's, ignored"]
    return {**nodes, **own}, notes if copied else []


def _address(seen: NodeObservation) -> Address | None:
    return parse_address(seen.slurm_address, seen.slurm_pattern)


def _slurm_domains(nodes: Mapping[str, NodeObservation], job: JobObservation) -> DomainPaths:
    addresses = address_paths({host: _address(seen) for host, seen in nodes.items()})
    names = {host: seen.slurm_node or host for host, seen in nodes.items()}
    return _first_of([addresses, topology_paths(job.slurm_topology, names)], len(nodes))


def _first_of(candidates: Sequence[DomainPaths], nodes: int) -> DomainPaths:
    """The first that knows at least half of the nodes, or else the one that knows most."""
    known = next((c for c in candidates if 2 * len(c.paths) >= nodes), None)
    return known or max(candidates, key=lambda c: len(c.paths))


def _seen(nodes: Mapping[str, NodeObservation], slurm: DomainPaths) -> _Seen:
    """What the host rules of platforms match: host -> {host, xname, block, nvlink_domain}."""
    blocks = slurm.paths if slurm.names[:1] == ("block",) else {}
    return {
        host: {
            "host": host,
            "xname": node.xname or "",
            "block": blocks[host][-1] if host in blocks else "",
            "nvlink_domain": node.nvlink_domain or "",
        }
        for host, node in nodes.items()
    }


def _auto(
    nodes: Mapping[str, NodeObservation],
    seen: _Seen,
    slurm: DomainPaths,
    job: JobObservation,
    notes: Sequence[str],
) -> Topology:
    nvlink = {h: (n.nvlink_domain,) for h, n in nodes.items() if n.nvlink_domain}
    xnames = {h: n.xname for h, n in nodes.items() if n.xname}
    platform, why = _recognised(list(nodes), job)
    if platform:
        notes = [*notes, f"bandwidths of platform {platform.name}, recognised by {why}"]
        names = platform.domain_paths(seen)
    else:
        notes = [*notes, "bandwidths are assumed; name a platform or give a topology file"]
        names = xname_paths(xnames)
    domains = _first_of(
        [paths_of_one_word("nvlink", nvlink, "PIPER_NVLINK_DOMAIN"), slurm, names], len(nodes)
    )
    if domains.paths:
        notes = [*notes, f"domains of nodes from {domains.source}"]
    else:
        notes = [*notes, "nothing is known above the nodes: the network is taken as flat"]
        domains = DomainPaths((), dict.fromkeys(nodes, ()), "host names")
    if platform and domains is names:
        levels = platform.network()
    else:
        levels = _levels(domains.names, platform)
    return assemble(AUTO, list(nodes), levels, domains, notes)


def _recognised(hosts: Sequence[str], job: JobObservation) -> tuple[Platform | None, str]:
    """The one platform that the cluster's name or all host names point to, and which it was."""
    platforms = [load_platform(name) for name in list_platforms()]
    by_cluster = [p for p in platforms if p.cluster and p.cluster.fullmatch(job.cluster or "")]
    by_hosts = [p for p in platforms if p.identified_by(hosts)]
    for found, why in ((by_cluster, f"cluster name {job.cluster}"), (by_hosts, "host names")):
        if len(found) == 1:
            return found[0], why
    return None, ""


def _levels(names: Sequence[str], platform: Platform | None) -> tuple[Level, ...]:
    """Levels for domains that do not come from a platform's rules.

    The platform's levels above the node lend their bandwidths from the inside outwards.
    """
    if platform is None:
        network = [_NETWORK_GBPS / 2**i for i in range(len(names) + 1)]
        return (
            Level(NODE, _NODE_GBPS, source="assumed: a link between accelerators"),
            *(
                Level(name, gbps, source="assumed: a 200 Gb/s port per rank, tapered 2:1 a level")
                for name, gbps in zip([*names, MACHINE], network, strict=True)
            ),
        )
    levels = platform.network()
    node = [level.name for level in levels].index(NODE)
    between, machine = levels[node + 1 : -1] or levels[-1:], levels[-1]
    lent = [between[min(i, len(between) - 1)] for i in range(len(names))]
    return (
        *levels[: node + 1],
        *(
            Level(name, like.gbps, source=f"as level {like.name} of platform {platform.name}")
            for name, like in zip(names, lent, strict=True)
        ),
        machine,
    )
