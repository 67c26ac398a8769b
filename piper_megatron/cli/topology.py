"""Shows where nodes are in the network, and the grid map of a job without running it."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from piper_megatron.errors import LayoutError, PiperError, TopologyError

if TYPE_CHECKING:
    from piper_megatron.layout.grid import ParallelLayout
    from piper_megatron.platform.topology import Location, Topology

NAME = "topology"
HELP = "show nodes and network levels, and the grid map of a job that would run there"
SIZES = ("tp", "cp", "pp", "ep", "etp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    where = parser.add_argument_group("nodes")
    where.add_argument(
        "--topology",
        default="auto",
        metavar="auto|NAME|FILE",
        help="a platform of the library, a topology file, or what this machine shows (default)",
    )
    where.add_argument(
        "--hosts",
        metavar="SET",
        help="nodes of the job, such as n[001-016,020]; without it all nodes of the file, or of "
        "this Slurm allocation",
    )
    where.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="default: what the platform has"
    )
    where.add_argument("--list", action="store_true", help="list the platforms of the library")

    grid = parser.add_argument_group("layout", "without any of these only the network is shown")
    grid.add_argument("--grid", metavar="PPxEP", help="pipeline and expert parallel sizes")
    for name, what in zip(
        SIZES, ("tensor", "context", "pipeline", "expert", "expert tensor"), strict=True
    ):
        grid.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} parallel size")

    placing = parser.add_argument_group("placement")
    placing.add_argument(
        "--launcher-order",
        choices=("block", "round-robin"),
        default="block",
        help="how the launcher numbers ranks over the nodes",
    )
    placing.add_argument("--placement", default="auto", metavar="auto|block|none|FILE")
    placing.add_argument("--save", metavar="FILE", help="write the placement for --piper-placement")

    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--all-nodes", action="store_true", help="show all nodes of a large job")


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    from piper_megatron.report import network

    width = max(shutil.get_terminal_size((100, 24)).columns, 80)
    if args.list:
        return _list(args.json)
    topology, hosts = _topology(args.topology, args.hosts)
    if not _wants_grid(args):
        if args.save:
            raise PiperError("--save needs a layout to place, for instance --grid 2x8")
        if args.json:
            return _print_json({"topology": network.topology_json(topology)})
        print(network.render_topology(topology, width, args.all_nodes))
        return 0
    return _grid_map(args, topology, hosts, width)


def _list(as_json: bool) -> int:
    from piper_megatron.platform.platform import list_platforms, load_platform
    from piper_megatron.report.network import render_platforms

    platforms = [load_platform(name) for name in list_platforms()]
    if as_json:
        return _print_json({"platforms": [p.model_dump(mode="json") for p in platforms]})
    print(render_platforms(platforms))
    return 0


def _print_json(content: dict[str, Any]) -> int:
    print(json.dumps(content))
    return 0


def _topology(source: str, host_set: str | None) -> "tuple[Topology, list[str]]":
    """The topology, and the hosts of the job."""
    from piper_megatron.platform.discovery import (
        JobObservation,
        NodeObservation,
        observe_job,
        resolve_topology,
    )
    from piper_megatron.platform.domains import XNAME
    from piper_megatron.platform.nodesets import expand
    from piper_megatron.platform.platform import is_path, load_platform
    from piper_megatron.platform.topology_file import read_topology

    if source != "auto" and not is_path(source):
        load_platform(source)  # an unknown name is said before missing hosts
    if is_path(source) and host_set is None:
        topology = read_topology(source)
        return topology, [node.host for node in topology.nodes]
    job = observe_job() if source == "auto" or host_set is None else JobObservation()
    hosts = expand(host_set) if host_set is not None else list(job.hosts)
    if not hosts:
        raise TopologyError(
            "no node is known outside of a Slurm allocation; name them, "
            "for instance --hosts 'n[001-016]'"
        )
    seen = [NodeObservation(host=h, xname=h if XNAME.fullmatch(h) else None) for h in hosts]
    return resolve_topology(source, seen, job), hosts


def _wants_grid(args: argparse.Namespace) -> bool:
    return args.grid is not None or any(getattr(args, name) is not None for name in SIZES)


def _grid_map(
    args: argparse.Namespace, topology: "Topology", hosts: Sequence[str], width: int
) -> int:
    from piper_megatron.layout.placement import (
        POLICIES,
        place,
        read_placement_file,
        write_placement_file,
    )
    from piper_megatron.layout.traffic import traffic_of
    from piper_megatron.report.grid_map import grid_map_json, render_grid_map
    from piper_megatron.report.network import topology_json

    locations = _locations(hosts, _ranks_per_node(args), args.launcher_order)
    layout = _layout(args, len(locations))
    traffic = traffic_of(layout)
    if args.placement in POLICIES:
        placement = place(layout, topology, locations, traffic, args.placement)
    else:
        placement = read_placement_file(args.placement, layout, topology, locations, traffic)
    if args.save:
        write_placement_file(args.save, locations, placement)
        print(f"placement written to {args.save}", file=sys.stderr)
    if args.json:
        content = grid_map_json(layout, topology, locations, placement)
        return _print_json({"topology": topology_json(topology)} | content)
    print(render_grid_map(layout, topology, locations, placement, width, args.all_nodes))
    return 0


def _ranks_per_node(args: argparse.Namespace) -> int:
    from piper_megatron.platform.platform import is_path, load_platform

    if args.ranks_per_node is not None:
        if args.ranks_per_node < 1:
            raise PiperError(f"--ranks-per-node must be at least 1, got {args.ranks_per_node}")
        return args.ranks_per_node
    if args.topology == "auto" or is_path(args.topology):
        raise PiperError("say how many ranks a node runs, for instance --ranks-per-node 8")
    return load_platform(args.topology).ranks_per_node


def _locations(hosts: Sequence[str], ranks_per_node: int, order: str) -> "list[Location]":
    """The location of each launcher rank."""
    from piper_megatron.platform.topology import Location

    if order == "round-robin":
        return [Location(host, i) for i in range(ranks_per_node) for host in hosts]
    return [Location(host, i) for host in hosts for i in range(ranks_per_node)]


def _layout(args: argparse.Namespace, world: int) -> "ParallelLayout":
    from piper_megatron.layout.grid import ParallelLayout
    from piper_megatron.workload.piper_flags import parse_grid

    sizes = {name: size for name in SIZES if (size := getattr(args, name)) is not None}
    if args.grid is not None:
        for name, size in zip(("pp", "ep"), parse_grid("--grid", args.grid), strict=True):
            if sizes.setdefault(name, size) != size:
                raise LayoutError(
                    f"--grid {args.grid} says {name.upper()} {size}, --{name} says {sizes[name]}; "
                    "remove one of the two"
                )
    sizes.setdefault("etp", sizes.get("tp", 1))  # as Megatron does
    return ParallelLayout(world=world, **sizes)
