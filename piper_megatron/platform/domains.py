"""From labels to a Topology: which nodes share which switch, chassis, rack or group."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piper_megatron.platform.nodesets import describe
from piper_megatron.platform.topology import NODE, Level, Node, Topology

XNAME = re.compile(r"(?P<cabinet>x\d+)(?P<chassis>c\d+)s\d+b\d+n\d+")


@dataclass(frozen=True)
class DomainPaths:
    """Labels of the domains above each node.

    Attributes:
        names: level names above the node, innermost first, without the outermost.
        paths: host -> one label per level, *outermost* first; hosts without labels are absent.
        source: where the labels come from, for the notes.
    """

    names: tuple[str, ...]
    paths: Mapping[str, tuple[str, ...]]
    source: str


def xname_paths(xnames: Mapping[str, str]) -> DomainPaths:
    """Cabinet and chassis out of HPE Cray component names such as x1100c0s6b1n0.

    Args:
        xnames: host -> xname.
    """
    found = {host: XNAME.fullmatch(xname) for host, xname in xnames.items()}
    paths = {host: (m["cabinet"], m["chassis"]) for host, m in found.items() if m}
    return DomainPaths(("chassis", "cabinet"), paths, "xnames")


def paths_of_one_word(word: str, paths: Mapping[str, tuple[str, ...]], source: str) -> DomainPaths:
    """Paths through a tree whose levels all have one name; made switch, switch2, switch3.

    All paths of a job have one depth. The few that have another are mistakes and left out.
    Outermost levels that hold the whole job are left out, the innermost level never: the outermost
    level of a Topology stands for the root of the tree.
    """
    depths = Counter(map(len, paths.values()))
    depth = max(depths, key=lambda d: (depths[d], d), default=0)
    paths = {host: path for host, path in paths.items() if len(path) == depth}
    shared = 0
    while shared < depth - 1 and len({path[shared] for path in paths.values()}) == 1:
        shared += 1
    names = tuple(f"{word}{i + 1}" if i else word for i in range(depth - shared))
    return DomainPaths(names, {host: path[shared:] for host, path in paths.items()}, source)


def assemble(
    name: str,
    hosts: Sequence[str],
    levels: Sequence[Level],
    domains: DomainPaths,
    notes: Sequence[str] = (),
) -> Topology:
    """A topology of hosts and their labels.

    A host without labels shares no domain with any other: nothing says that it is near one, and a
    common 'unknown' domain would look like the nearest of all to a placement. Levels without any
    label are left out.

    Args:
        name: of the topology.
        hosts: nodes, in the order of the result.
        levels: all levels, innermost first, with those of `domains.names` between `node` and the
            last.
        domains: the labels.
        notes: what else to tell the user.
    """
    if not any(host in domains.paths for host in hosts):
        names = [level.name for level in levels]
        missing = names[names.index(NODE) + 1 : -1]
        if missing:
            notes = (*notes, f"no {' or '.join(missing)} is known from {domains.source}")
        levels = [level for level in levels if level.name not in missing]
        domains = DomainPaths((), dict.fromkeys(hosts, ()), domains.source)
    unknown = [host for host in hosts if host not in domains.paths]
    if unknown:
        notes = (
            *notes,
            f"{describe(unknown)}: no {' or '.join(domains.names)} is known from "
            f"{domains.source}; taken as far from every other node",
        )
    alone = {host: (f"unknown:{host}",) * len(domains.names) for host in unknown}
    paths = {**domains.paths, **alone}
    return Topology(name, tuple(levels), tuple(Node(h, paths[h]) for h in hosts), tuple(notes))
