"""Where ranks are: nested network levels and the place of every node in them.

Two ranks *meet* at the innermost level whose domain holds both: two tiles of one GPU at `pair`,
two GPUs of a host at `node`, two hosts of a dragonfly group at `group`. What a byte between them
costs is that level's bandwidth.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from piper_megatron.errors import TopologyError

NODE = "node"


@dataclass(frozen=True)
class Level:
    """One nesting level of the network.

    Attributes:
        name: `pair`, `node`, `switch`, `group`, `rack`, `machine`, ...
        gbps: GB/s (1e9 bytes a second, one direction) that each rank gets when all ranks send to
            peers that they meet at this level.
        ranks: ranks in one domain; only for levels inside a node.
        evidence: `measured`, `published`, `fitted` or `assumed`.
        source: where the number comes from.
    """

    name: str
    gbps: float
    ranks: int | None = None
    evidence: str = "assumed"
    source: str = ""


@dataclass(frozen=True)
class Node:
    """A host and the labels of the domains above it, outermost first (without `machine`)."""

    host: str
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Location:
    """The device a process drives."""

    host: str
    local_rank: int


@dataclass(frozen=True)
class Topology:
    """Levels, innermost first, the last one holding everything; and the nodes.

    Every node's `path` has one label for each level between `node` and the outermost.
    """

    name: str
    levels: tuple[Level, ...]
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    _index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if NODE not in names or len(set(names)) != len(names):
            raise TopologyError(
                f"topology {self.name}: levels must have distinct names and one called 'node', "
                f"got {', '.join(names)}"
            )
        above_node = names[names.index(NODE) + 1 : -1] if names[-1] != NODE else []
        for node in self.nodes:
            if len(node.path) != len(above_node):
                raise TopologyError(
                    f"topology {self.name}: node {node.host} needs one label for each of "
                    f"[{', '.join(reversed(above_node))}], got {list(node.path)}"
                )
        twice = [host for host, n in Counter(n.host for n in self.nodes).items() if n > 1]
        if twice:
            raise TopologyError(f"topology {self.name}: node {twice[0]} is listed twice")
        object.__setattr__(self, "_index", {n.host: i for i, n in enumerate(self.nodes)})

    @property
    def node_level(self) -> int:
        """Index of the level `node` in `levels`."""
        return [level.name for level in self.levels].index(NODE)

    def domains(self, locations: Sequence[Location]) -> np.ndarray:
        """Domain numbers of each rank at each level.

        Args:
            locations: one per rank.

        Returns:
            int64 array [ranks, levels], levels innermost first. Numbers are dense from 0 within a
            level and nested: equal numbers at one level imply equal numbers at every outer one.

        Raises:
            TopologyError: a host that the topology does not list, or a device that two ranks claim.
        """
        missing = sorted({loc.host for loc in locations} - self._index.keys())
        if missing:
            raise TopologyError(
                f"topology {self.name} does not list node {missing[0]}"
                + (f" (nor {len(missing) - 1} more)" if len(missing) > 1 else "")
                + "; add it under 'nodes:' or use --piper-topology auto"
            )
        twice = [loc for loc, n in Counter(locations).items() if n > 1]
        if twice:
            raise TopologyError(
                f"node {twice[0].host} reports twice: two ranks claim its local rank "
                f"{twice[0].local_rank}; host names must be unique and LOCAL_RANK set per process"
            )
        node = np.array([self._index[loc.host] for loc in locations], dtype=np.int64)
        local = np.array([loc.local_rank for loc in locations], dtype=np.int64)
        columns = []
        for i, level in enumerate(self.levels):
            if i < self.node_level:
                assert level.ranks, f"level {level.name} inside a node has a size"
                keys = np.stack([node, local // level.ranks], axis=1)
            elif i == self.node_level:
                keys = node[:, None]
            else:
                depth = len(self.levels) - 1 - i
                numbers: dict[tuple[str, ...], int] = {}
                of_node = np.array(
                    [numbers.setdefault(n.path[:depth], len(numbers)) for n in self.nodes]
                )
                keys = of_node[node][:, None]
            columns.append(np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1))
        return np.stack(columns, axis=1).astype(np.int64)
