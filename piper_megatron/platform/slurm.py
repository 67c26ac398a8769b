"""What Slurm says about the network, as text: a node's topology address, and the whole topology.

Both have the same content. Tree plugin: the switches above a node, outermost first; a node may be
below several switches of one level (`s[0-1]`) and below none of some level (an empty name). Block
plugin: the node's block, and in the whole topology the aggregated blocks around it.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from piper_megatron.errors import TopologyError
from piper_megatron.platform.domains import DomainPaths, paths_of_one_word
from piper_megatron.platform.nodesets import expand

_UNIT = re.compile(r"^(?:(Switch|Block)Name|Aggregated(Block))=(\S+)")
_FIELD = re.compile(r"\b(Level|BlockSize|Nodes)=(\S+)")


@dataclass(frozen=True)
class Address:
    """A node's address, taken apart.

    Attributes:
        node: Slurm's name of the node.
        word: what the domains above it are: `switch`, `block`, `ring`, ...
        path: their labels, outermost first.
    """

    node: str
    word: str
    path: tuple[str, ...]


def parse_address(address: str | None, pattern: str | None) -> Address | None:
    """Takes SLURM_TOPOLOGY_ADDR apart with SLURM_TOPOLOGY_ADDR_PATTERN.

    `root.leaf1.n5` with `switch.switch.node`; `b3.n5` with `block.node`; `r0:3.n5` with
    `ring:position.node`, of which the ring counts.

    Returns:
        None when there is no address, when it does not fit its pattern, or when it names no domain
        above the node: the plugin knows nothing about it.
    """
    words = (pattern or "").split(".")
    parts = (address or "").split(".", len(words) - 1)  # a node's name may contain dots
    if words[-1] != "node" or len(words) < 2 or len(parts) != len(words):
        return None
    *labels, node = parts
    labels = [
        label.partition(":")[0] if ":" in word else label
        for word, label in zip(words, labels, strict=False)
    ]
    if not any(labels):
        return None
    return Address(node, words[-2].partition(":")[0], _filled(labels, node))


def address_paths(addresses: Mapping[str, Address | None]) -> DomainPaths:
    """Domains of a job from its nodes' addresses.

    Args:
        addresses: host -> its address.
    """
    known = {host: address for host, address in addresses.items() if address}
    word = next((address.word for address in known.values()), "switch")
    paths = {host: address.path for host, address in known.items() if address.word == word}
    return paths_of_one_word(word, paths, "SLURM_TOPOLOGY_ADDR")


def topology_paths(text: str, slurm_names: Mapping[str, str]) -> DomainPaths:
    """Domains of a job from the output of `scontrol show topology`; unreadable lines are skipped.

    Args:
        text: lines such as `SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[1-4]`,
            `BlockName=b0 BlockIndex=0 Nodes=n[1-18] BlockSize=18` or
            `AggregatedBlock=b[0-1] BlockIndex=4 Nodes=n[1-36] BlockSize=36`.
        slurm_names: host -> Slurm's name of the node.
    """
    job = frozenset(slurm_names.values())
    word = "switch"
    units: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in text.splitlines():
        unit, fields = _UNIT.match(line.strip()), dict(_FIELD.findall(line))
        if not unit:
            continue
        base, aggregated, name = unit.groups()
        word = (base or aggregated).lower()
        height = int(fields.get("Level") or (fields.get("BlockSize", 1) if aggregated else 0))
        try:
            nodes = job.intersection(expand(fields.get("Nodes", "")))
        except TopologyError:
            continue
        for node in nodes:
            units[height][node].append(name)
    paths = {}
    for host, node in slurm_names.items():
        labels = ["+".join(sorted(units[h][node])) for h in sorted(units, reverse=True)]
        if any(labels):
            paths[host] = _filled(labels, node)
    return paths_of_one_word(word, paths, "scontrol show topology")


def _filled(labels: Sequence[str], node: str) -> tuple[str, ...]:
    """Labels, outermost first; where a level has none, the next inner one stands for it."""
    path = [node]
    for label in reversed(labels):
        path.append(label or path[-1])
    return tuple(reversed(path[1:]))
