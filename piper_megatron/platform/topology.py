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
MACHINE = "machine"


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

    Every node's `path` has one label for each level between `node` and the outermost. A label
    names a domain only together with the labels before it, so `c0` of two cabinets are two domains.

    Raises:
        TopologyError: levels or nodes that contradict this description; the level or node is named.
    """

    name: str
    levels: tuple[Level, ...]
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    _index: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_levels()
        labelled = self.levels[self.node_level + 1 : -1]
        for node in self.nodes:
            if len(node.path) != len(labelled):
                raise TopologyError(
                    f"topology {self.name}: node {node.host} needs one label for each of "
                    f"[{', '.join(level.name for level in reversed(labelled))}], "
                    f"got {list(node.path)}"
                )
        twice = [host for host, n in Counter(n.host for n in self.nodes).items() if n > 1]
        if twice:
            raise TopologyError(f"topology {self.name}: node {twice[0]} is listed twice")
        object.__setattr__(self, "_index", {n.host: i for i, n in enumerate(self.nodes)})

    def _check_levels(self) -> None:
        names = [level.name for level in self.levels]
        if NODE not in names or len(set(names)) != len(names):
            raise TopologyError(
                f"topology {self.name}: levels must have distinct names and one called 'node', "
                f"got [{', '.join(names)}]"
            )
        for level in self.levels:
            if not level.gbps > 0:
                raise TopologyError(
                    f"topology {self.name}: level {level.name} needs gbps above 0, got {level.gbps}"
                )
        for level in self.levels[self.node_level :]:
            if level.ranks is not None:
                raise TopologyError(
                    f"topology {self.name}: level {level.name} is not inside a node, remove its "
                    f"'ranks'"
                )
        inside = self.levels[: self.node_level]
        for level, smaller in zip(inside, (None, *inside), strict=False):
            size, step = level.ranks or 0, (smaller.ranks or 1) if smaller else 1
            if size < 1 or size % step:
                raise TopologyError(
                    f"topology {self.name}: level {level.name} inside the node needs 'ranks', a "
                    f"multiple of {step}, got {level.ranks}"
                )
        if names[-1] == NODE and len(self.nodes) > 1:
            raise TopologyError(
                f"topology {self.name}: {len(self.nodes)} nodes need a level above 'node', "
                "for instance 'machine'"
            )

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
        node = self._node_of(locations)
        local = np.array([loc.local_rank for loc in locations], dtype=np.int64)
        stride = int(local.max(initial=0)) + 1
        self._check_devices(locations, node * stride + local)
        keys = [node * stride + local // (lv.ranks or 1) for lv in self.levels[: self.node_level]]
        keys.append(node)
        for depth in reversed(range(len(self.levels) - self.node_level - 1)):
            numbers: dict[tuple[str, ...], int] = {}
            prefixes = (n.path[:depth] for n in self.nodes)
            number_of = np.array([numbers.setdefault(p, len(numbers)) for p in prefixes], np.int64)
            keys.append(number_of[node])
        return np.stack([np.unique(key, return_inverse=True)[1] for key in keys], axis=1)

    def _node_of(self, locations: Sequence[Location]) -> np.ndarray:
        missing = sorted({loc.host for loc in locations} - self._index.keys())
        if missing:
            raise TopologyError(
                f"topology {self.name} does not list node {missing[0]}"
                + (f" (nor {len(missing) - 1} more)" if len(missing) > 1 else "")
                + "; add it under 'nodes:' or use --piper-topology auto"
            )
        return np.array([self._index[loc.host] for loc in locations], dtype=np.int64)

    def _check_devices(self, locations: Sequence[Location], device: np.ndarray) -> None:
        found, first, times = np.unique(device, return_index=True, return_counts=True)
        if len(found) < len(device):
            twice = locations[int(first[times > 1].min())]
            raise TopologyError(
                f"node {twice.host} reports twice: two ranks claim its local rank "
                f"{twice.local_rank}; host names must be unique and LOCAL_RANK set per process"
            )
