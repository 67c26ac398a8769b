"""How platforms and nodes look: levels with their bandwidths, the tree of network domains."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from piper_megatron.platform.nodesets import fold
from piper_megatron.platform.platform import Platform
from piper_megatron.platform.topology import Node, Topology
from piper_megatron.report.text import count, facts, render, table

MAX_DOMAINS = 40
FIRST_DOMAINS, LAST_DOMAINS = 20, 8


def render_platforms(platforms: Iterable[Platform]) -> str:
    """A table of platforms."""
    rows = table("platform", "ranks per node", "description", left=(0, 2))
    for platform in platforms:
        rows.add_row(platform.name, str(platform.ranks_per_node), platform.description)
    return render([rows])


def render_topology(topology: Topology, width: int = 100, all_nodes: bool = False) -> str:
    """Draws levels and domains as plain ASCII text.

    Args:
        topology: what to draw.
        width: columns to wrap prose at.
        all_nodes: draw every domain, however many there are.
    """
    levels = [
        (level.name, f"{level.gbps:g} ({level.evidence}) {level.source}")
        for level in topology.levels
    ]
    notes = [("note", note) for note in topology.notes]
    return render(
        [
            f"Topology {topology.name}: {count(len(topology.nodes), 'node')}",
            "GB/s of each rank when all ranks send to peers that they meet at a level:",
            facts(levels, width),
            "\n".join(_tree(topology, all_nodes)),
            *([facts(notes, width)] if notes else []),
        ]
    )


def _tree(topology: Topology, all_nodes: bool) -> list[str]:
    outermost, *names = [lv.name for lv in topology.levels[-1 : topology.node_level : -1]] or [""]
    if not names:
        return [f"{outermost}: {fold(node.host for node in topology.nodes)}"]
    lines = [f"{outermost}: {count(len(topology.nodes), 'node')}", *_domains(topology.nodes, names)]
    if len(lines) <= MAX_DOMAINS or all_nodes:
        return lines
    hidden = len(lines) - FIRST_DOMAINS - LAST_DOMAINS
    dots = f"  ... {count(hidden, 'more domain')} (--all-nodes shows them)"
    return [*lines[:FIRST_DOMAINS], dots, *lines[-LAST_DOMAINS:]]


def _domains(nodes: Sequence[Node], names: Sequence[str], depth: int = 0) -> Iterator[str]:
    """A line for every domain of nodes that share their first `depth` labels."""
    by_label: dict[str, list[Node]] = {}
    for node in nodes:
        by_label.setdefault(node.path[depth], []).append(node)
    for label, members in by_label.items():
        domain = f"{'  ' * (depth + 1)}{names[depth]} {label}"
        if depth + 1 == len(names):
            yield f"{domain}: {fold(node.host for node in members)}"
        else:
            yield f"{domain}: {count(len(members), 'node')}"
            yield from _domains(members, names, depth + 1)


def topology_json(topology: Topology) -> dict[str, Any]:
    """Name, levels (innermost first), nodes with their labels (outermost first), and notes."""
    return {
        "name": topology.name,
        "levels": [asdict(level) for level in topology.levels],
        "nodes": [{"host": node.host, "path": list(node.path)} for node in topology.nodes],
        "notes": list(topology.notes),
    }
