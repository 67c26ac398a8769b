"""Topology files: the nodes of a cluster and their place in its network, as YAML.

name: mycluster
levels:                          # innermost first; or instead: platform: NAME
  - {name: node, gbps: 50}
  - {name: switch, gbps: 25}
  - {name: machine, gbps: 12.5}
nodes:                           # one label for each level between node and the outermost
  - {hosts: "n[001-016]", switch: s0}
  - {hosts: "n[017-032]", switch: s1}
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from pydantic import PositiveFloat, PositiveInt

from piper_megatron.errors import TopologyError
from piper_megatron.platform.evidence import Evidence, Name, Text
from piper_megatron.platform.nodesets import expand, fold
from piper_megatron.platform.platform import is_path, load_platform
from piper_megatron.platform.topology import Level, Node, Topology
from piper_megatron.strict import StrictModel, nearest, read_model


class _FileLevel(StrictModel):
    name: Name
    gbps: PositiveFloat
    ranks: PositiveInt | None = None
    evidence: Evidence = "assumed"
    source: str = ""


class _TopologyFile(StrictModel):
    name: Text
    platform: str | None = None
    levels: tuple[_FileLevel, ...] | None = None
    nodes: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()


def read_topology(path: str | Path) -> Topology:
    """Reads a topology file.

    Raises:
        TopologyError: one line that names the file, the key or node, and the fix.
    """
    content = read_model(Path(path), _TopologyFile)
    try:
        levels = _levels(content, Path(path).parent)
        empty = Topology(content.name, levels, (), content.notes)
        return replace(empty, nodes=tuple(_nodes(content.nodes, empty)))
    except TopologyError as error:
        raise TopologyError(f"{path}: {error}") from None


def _levels(content: _TopologyFile, folder: Path) -> tuple[Level, ...]:
    if content.platform and content.levels is None:
        name = content.platform
        return load_platform(str(folder / name) if is_path(name) else name).network()
    if content.platform or not content.levels:
        raise TopologyError("give either 'levels' or 'platform', which has levels")
    return tuple(Level(**level.model_dump()) for level in content.levels)


def _nodes(entries: Iterable[dict[str, Any]], topology: Topology) -> Iterator[Node]:
    labelled = _labelled(topology)
    for number, entry in enumerate(entries):
        hosts = entry.get("hosts")
        where = f"nodes.{number} ({hosts})"
        if not isinstance(hosts, str) or not hosts.strip():
            raise TopologyError(f"nodes.{number} needs 'hosts', for instance n[001-016]")
        for key in entry:
            if key not in ("hosts", *labelled):
                hint = nearest(str(key), ["hosts", *labelled])
                raise TopologyError(f"{where}: unknown key '{key}'; {hint}")
        for level in labelled:
            if not isinstance(entry.get(level), str | int) or isinstance(entry[level], bool):
                raise TopologyError(f"{where} needs a label for {level}, for instance {level}: a0")
        path = tuple(str(entry[level]) for level in labelled)
        for host in expand(hosts):
            yield Node(host, path)


def _labelled(topology: Topology) -> list[str]:
    """Names of the levels between the node and the outermost, outermost first."""
    return [level.name for level in topology.levels[topology.node_level + 1 : -1][::-1]]


def write_topology(topology: Topology, path: str | Path) -> None:
    """Writes a topology file that `read_topology` turns into an equal topology."""
    levels = topology.levels
    labelled = _labelled(topology)
    content: dict[str, Any] = {
        "name": topology.name,
        "levels": [{k: v for k, v in vars(lv).items() if v not in (None, "")} for lv in levels],
        "nodes": [
            {"hosts": hosts, **dict(zip(labelled, labels, strict=True))}
            for hosts, labels in _runs(topology.nodes)
        ],
    }
    if topology.notes:
        content["notes"] = list(topology.notes)
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)
    Path(path).write_text(text, encoding="utf-8")


def _runs(nodes: Iterable[Node]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Consecutive nodes of one path as node sets, which must keep the order of the nodes."""
    for path, run in groupby(nodes, key=lambda node: node.path):
        hosts = [node.host for node in run]
        folded = fold(hosts)
        for text in [folded] if expand(folded) == hosts else hosts:
            yield text, path
