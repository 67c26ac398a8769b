"""What a dispatcher costs beside Megatron's own, where there is nothing to win: inside one node.

One MoE layer, forward and backward, on the CPU backend. The dispatchers share weights and inputs
and take turns in the same processes; a round runs each once, in an order that rotates. A figure is
the median over the rounds of a dispatcher's time by that of Megatron's in the same round, for the
time on the clock and for the CPU time of all ranks, in which other work on the machine shows less.
"Megatron again" is Megatron's own a second time: how far its ratio is from 1 is noise.

    python benchmarks/dispatcher_overhead.py [--rounds N] [--nodes M]

With `--nodes M` the ranks are taken for M nodes and all algorithms run, for information: their hops
cost what they cost, and no link is slow.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from statistics import median
from typing import Any

from moe_layer import LayerSizes, build_layer, expert_groups, train_layer, with_dispatcher

RANKS = 4
LIMIT = 1.05
PLAIN, AGAIN = "Megatron", "Megatron again"
SIZES = LayerSizes(hidden=256, expert_ffn=256, experts=16, topk=4, tokens=256)
WARM_UP_ROUNDS = 3
# what the parent tells its ranks
JOB = "DISPATCHER_OVERHEAD"


def measure(rounds: int, nodes: int) -> dict[str, list[tuple[float, float]]]:
    """One rank's part.

    Returns:
        For each dispatcher and round, seconds on the clock and CPU seconds of all ranks.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    groups = expert_groups(nodes)
    plain = build_layer(SIZES)
    algorithms = ("flat",) if nodes == 1 else ("flat", "2dh", "halo", "rail", "rbd")
    layers = {PLAIN: plain, AGAIN: plain}
    layers |= {name: with_dispatcher(plain, name, groups) for name in algorithms}
    tokens = torch.randn(SIZES.tokens, SIZES.hidden)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in layers}
    names = list(layers)
    for number in range(WARM_UP_ROUNDS + rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            taken[name].append(_seconds(layers[name], tokens))
    return {name: times[WARM_UP_ROUNDS:] for name, times in taken.items()}


def _seconds(layer: Any, tokens: Any) -> tuple[float, float]:
    """On the clock until the slowest rank is done; of the CPUs, over all ranks."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    started, cpu_started = time.perf_counter(), time.process_time()
    train_layer(layer, tokens)
    cpu_s = torch.tensor(time.process_time() - cpu_started, dtype=torch.float64)
    dist.all_reduce(cpu_s)
    return time.perf_counter() - started, float(cpu_s)


def run_ranks(rounds: int, nodes: int) -> dict[str, list[list[float]]]:
    """Starts the ranks as processes of this script; what rank 0 measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        JOB: json.dumps([rounds, nodes]),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"dispatcher_overhead: ranks ended with {[rank.returncode for rank in ranks]}")
    return json.loads(outputs[0].splitlines()[-1])


def ratios(taken: dict[str, list[list[float]]], name: str, clock: int) -> list[float]:
    """A dispatcher's time by Megatron's, of each round, in order of size."""
    return sorted(
        own[clock] / plain[clock] for own, plain in zip(taken[name], taken[PLAIN], strict=True)
    )


def report(taken: dict[str, list[list[float]]]) -> str:
    """A table of medians and paired ratios."""
    lines = [f"{'dispatcher':<15}  {'ms':>7}  of Megatron's: clock (quartiles)    CPU (quartiles)"]
    for name, times in taken.items():
        line = f"{name:<15}  {median(clock_s for clock_s, _ in times) * 1e3:7.1f}  "
        for clock in (0, 1):
            own = ratios(taken, name, clock)
            quarter = len(own) // 4
            line += f"  {median(own):9.3f} ({own[quarter]:.3f} - {own[-1 - quarter]:.3f})"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    """Exit code 1 when `flat` inside one node costs more than `LIMIT`."""
    if job := os.environ.get(JOB):
        from piper_megatron.runtime import cpu

        cpu.enable()
        print(json.dumps(measure(*json.loads(job))))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2, 4))
    arguments = parser.parse_args()
    taken = run_ranks(arguments.rounds, arguments.nodes)
    print(f"{RANKS} ranks on {arguments.nodes} nodes, {SIZES}")
    print(report(taken))
    if arguments.nodes > 1:
        return 0
    ratio = median(ratios(taken, "flat", 0))
    print(f"{'at most' if ratio <= LIMIT else 'MORE than'} {LIMIT} of Megatron's time")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
