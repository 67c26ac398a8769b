"""How long the placement of a whole machine takes: 9,408 nodes x 8 ranks, in one process.

    python benchmarks/placement_scale.py

Nodes sit in chassis of 16 and groups of 128, as on a large dragonfly machine. Every layout is
placed with the launcher's ranks node by node, shuffled over the machine, and with two nodes that
run half as many ranks as the others.
"""

import argparse
import resource
import time

import numpy as np

from piper_megatron.layout.grid import ParallelLayout
from piper_megatron.layout.placement import place
from piper_megatron.layout.traffic import traffic_of
from piper_megatron.platform.topology import Level, Location, Node, Topology

NODES, RANKS_PER_NODE = 9408, 8
LAYOUTS = (
    {"pp": 8, "ep": 64},
    {"pp": 16, "ep": 8},
    {"pp": 12, "ep": 16, "tp": 2, "etp": 1},
    {"pp": 4, "ep": 64, "tp": 8, "etp": 1, "cp": 2},
)


def machine(nodes: int) -> Topology:
    """A dragonfly of chassis and groups."""
    levels = (
        Level("pair", 200, ranks=2),
        Level("node", 50),
        Level("chassis", 12.5),
        Level("group", 12.5),
        Level("machine", 7.14),
    )
    places = tuple(Node(f"n{i:05d}", (f"g{i // 128}", f"c{i // 16}")) for i in range(nodes))
    return Topology("dragonfly", levels, places)


def main() -> None:
    """Places every layout and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=NODES)
    nodes = parser.parse_args().nodes
    topology = machine(nodes + 1)
    in_order = [Location(n.host, i) for n in topology.nodes[:-1] for i in range(RANKS_PER_NODE)]
    half = RANKS_PER_NODE // 2
    jobs = {
        "in order": in_order,
        "shuffled": [in_order[i] for i in np.random.default_rng(0).permutation(len(in_order))],
        # the last two nodes run half as many ranks, so ranks are packed instead of nodes
        "unequal nodes": in_order[:-half]
        + [Location(topology.nodes[-1].host, i) for i in range(half)],
    }
    print(f"{'layout':24} {'launcher':14} seconds  cost before -> after (s), order")
    for sizes in LAYOUTS:
        words = " ".join(f"{axis}{size}" for axis, size in sizes.items())
        for name, locations in jobs.items():
            start = time.perf_counter()
            layout = ParallelLayout(world=len(locations), **sizes)
            placement = place(layout, topology, locations, traffic_of(layout))
            seconds = time.perf_counter() - start
            print(
                f"{words:24} {name:14} {seconds:7.2f}  {placement.cost_before_s:.4g} -> "
                f"{placement.cost_after_s:.4g}, {placement.order}",
                flush=True,
            )
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak resident memory: {peak_gib:.2f} GiB")


if __name__ == "__main__":
    main()
