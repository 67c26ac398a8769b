"""The grid map: which device plays which part, and what crosses the network before and after."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from piper_megatron.layout.crossing import crossing_shares
from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.placement import Placement, logical_ranks_of_hosts
from piper_megatron.platform.topology import Location, Topology
from piper_megatron.report.text import count, facts, fold, percent, render, seconds, table

MAX_NODES = 32
FIRST_NODES, LAST_NODES = 12, 4
GROUP_NAMES = {
    "tp": "tensor (TP)",
    "cp": "context (CP)",
    "tp_ep": "expert (EP)",
    "pp": "pipeline (PP)",
    "dp": "data (DP)",
    "edp": "expert data (EDP)",
}


def render_grid_map(
    layout: ParallelLayout,
    topology: Topology,
    locations: Sequence[Location],
    placement: Placement,
    width: int = 100,
    all_nodes: bool = False,
) -> str:
    """Draws the map as plain ASCII text.

    Args:
        layout: parallel sizes.
        topology: nodes and network levels.
        locations: where each launcher rank runs.
        placement: the renumbering in force.
        width: columns, at least 80.
        all_nodes: draw every node, however many there are.
    """
    ranks_of_host = logical_ranks_of_hosts(locations, placement)
    blocks: list[str | Table] = [
        _title(layout, topology, len(ranks_of_host)),
        _devices(layout, topology, ranks_of_host, width, all_nodes),
    ]
    if layout.world > 1:
        blocks += [
            "Groups that leave a domain of each level, launcher's order -> this placement:",
            _crossing(layout, topology, locations, placement),
        ]
    blocks.append(facts(_facts(topology, placement), width))
    return render(blocks)


def _title(layout: ParallelLayout, topology: Topology, nodes: int) -> str:
    return (
        f"Piper grid {layout.pp}x{layout.ep} (PP x EP): "
        f"{count(layout.world, 'rank')} on {count(nodes, 'node')}, topology {topology.name}\n"
        f"DP {layout.dp}, EDP {layout.edp}, TP {layout.tp}, CP {layout.cp}, ETP {layout.etp}"
    )


def _devices(
    layout: ParallelLayout,
    topology: Topology,
    ranks_of_host: dict[str, list[int]],
    width: int,
    all_nodes: bool,
) -> Table:
    """A row for each node, in the order of lowest logical ranks."""
    hosts = list(ranks_of_host)
    elide = len(hosts) > MAX_NODES and not all_nodes
    shown = hosts[:FIRST_NODES] + hosts[-LAST_NODES:] if elide else hosts

    levels = "/".join(level.name for level in topology.levels[-2 : topology.node_level : -1])
    path = {node.host: "/".join(node.path) for node in topology.nodes}
    headings = ["node", levels, "ranks"]
    cells = {host: [host, path[host], fold(ranks_of_host[host])] for host in shown}
    if not levels:
        headings, cells = headings[::2], {host: row[::2] for host, row in cells.items()}

    axes = ["pp", "dp", "cp", "ep", "tp"] if layout.cp > 1 else ["pp", "dp", "ep", "tp"]
    at = layout.coordinates()
    parts = {
        host: [".".join(str(at[axis][rank]) for axis in axes) for rank in ranks_of_host[host]]
        for host in shown
    }
    widths = [max(map(len, column)) for column in zip(headings, *cells.values(), strict=True)]
    lines = _in_lines(parts, width - sum(w + 2 for w in widths))

    rows = table(*headings, f"devices by local rank: {'.'.join(axes)}", left=range(4))
    for i, host in enumerate(shown):
        if elide and i == FIRST_NODES:
            hidden = count(len(hosts) - len(shown), "more node")
            rows.add_row(
                *["..."] * len(headings), f"{hidden} (piper-megatron topology --all-nodes)"
            )
        rows.add_row(*cells[host], lines[host])
    return rows


def _in_lines(parts: dict[str, list[str]], room: int) -> dict[str, str]:
    """Aligns cells; as many side by side as fit, in lines of equal length if that can be."""
    cell = max(len(part) for row in parts.values() for part in row)
    most = max(len(row) for row in parts.values())
    fitting = max((room + 2) // (cell + 2), 1)
    per_line = max((n for n in range(1, most + 1) if n <= fitting and most % n == 0), default=1)
    return {
        host: "\n".join(
            "  ".join(part.ljust(cell) for part in row[i : i + per_line])
            for i in range(0, len(row), per_line)
        )
        for host, row in parts.items()
    }


def _crossing(
    layout: ParallelLayout,
    topology: Topology,
    locations: Sequence[Location],
    placement: Placement,
) -> Table:
    before, after = _crossing_shares(layout, topology, locations, placement)
    rows = table("groups", "number x size", *(level.name for level in topology.levels[:-1]))
    for kind, old in before.items():
        size = layout.group_size(kind)
        changes = [
            percent(share) if share == new else f"{percent(share)} -> {percent(new)}"
            for share, new in zip(old.values(), after[kind].values(), strict=True)
        ]
        rows.add_row(GROUP_NAMES[kind], f"{layout.world // size} x {size}", *changes)
    return rows


def _crossing_shares(
    layout: ParallelLayout,
    topology: Topology,
    locations: Sequence[Location],
    placement: Placement,
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """`crossing_shares` in the launcher's order and in the placement."""
    launcher = topology.domains(locations)
    placed = launcher[placement.physical_of_logical]
    return crossing_shares(layout, topology, launcher), crossing_shares(layout, topology, placed)


def _facts(topology: Topology, placement: Placement) -> list[tuple[str, str]]:
    old, new = placement.cost_before_s, placement.cost_after_s
    cost = seconds(new)
    if new != old:
        change = f"{old / new:.3g} times less" if new < old else f"{new / old:.3g} times more"
        cost = f"{seconds(old)} -> {cost} ({change})"
    bandwidths = ", ".join(
        f"{level.name} {level.gbps:g} ({level.evidence})" for level in topology.levels
    )
    return [
        ("order", placement.order),
        ("cost", f"{cost}: communication of a rank per step, without overlap"),
        ("model", placement.cost_model),
        ("GB/s", f"{bandwidths}; of each rank, to peers that it meets there"),
        *(("note", note) for note in (*placement.notes, *topology.notes)),
    ]


def grid_map_json(
    layout: ParallelLayout,
    topology: Topology,
    locations: Sequence[Location],
    placement: Placement,
) -> dict[str, Any]:
    """The map's content: sizes, logical ranks of hosts by local rank, crossing shares, costs."""
    before, after = _crossing_shares(layout, topology, locations, placement)
    return {
        "layout": asdict(layout) | {"dp": layout.dp, "edp": layout.edp},
        "placement": {
            "order": placement.order,
            "contiguous": placement.contiguous,
            "hosts": logical_ranks_of_hosts(locations, placement),
            "notes": list(placement.notes),
        },
        "crossing": {"before": before, "after": after},
        "cost": {
            "before_s": placement.cost_before_s,
            "after_s": placement.cost_after_s,
            "model": placement.cost_model,
        },
    }
