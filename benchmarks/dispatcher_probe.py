"""What every rank of `dispatcher_lab.py` does: exchanges rows in several ways that take turns.

The only argument is a JSON object: the name of a task and its arguments. Rank 0 prints the result
as a line of JSON.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from piper_megatron.bench.dispatchers import build_dispatchers, round_trip, uniform_routing
from piper_megatron.runtime.dispatch.exchange import EXCHANGES, Links
from piper_megatron.runtime.dispatch.groups import ExpertGroups, split_group
from piper_megatron.runtime.dispatch.wire import Hop, Segment

TIMEOUT = timedelta(minutes=5)
LONGEST_ROW_BYTES = 4096


@dataclass(frozen=True)
class Measured:
    """One way of exchanging.

    Attributes:
        seconds: of a call, of the slowest rank, one number a repeat.
        messages_between: that hosts send to each other in a call.
        messages_inside: between ranks of one host in a call.
        crossed_bytes: that hosts send to each other in a call, headers included.
    """

    seconds: tuple[float, ...]
    messages_between: int
    messages_inside: int
    crossed_bytes: float


def measure(
    ways: dict[str, Callable[[], torch.Tensor]],
    hosts: Sequence[str],
    repeats: int,
    calls: int,
    tolerance: float,
) -> dict[str, Measured]:
    """Times all ways in turns; collective over all ranks.

    Args:
        ways: by name; all compute the same.
        hosts: of every rank.
        repeats: how often each way has its turn.
        calls: one after the other in a turn.
        tolerance: by which their results may differ.
    """
    counted, expected = {}, None
    for name, way in ways.items():
        *counted[name], result = _count(way, hosts, calls)
        expected = result if expected is None else expected
        if not torch.allclose(result, expected, rtol=tolerance, atol=tolerance):
            raise SystemExit(f"{name} computes something else than {next(iter(ways))}")
    seconds = torch.zeros(len(ways), repeats)
    for repeat, turn in product(range(repeats), range(len(ways))):
        number = (repeat + turn) % len(ways)
        way = list(ways.values())[number]
        dist.barrier()
        started = time.perf_counter()
        for _ in range(calls):
            way()
        seconds[number, repeat] = (time.perf_counter() - started) / calls
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return {
        name: Measured(tuple(seconds[number].tolist()), *counted[name])
        for number, name in enumerate(ways)
    }


def _count(
    way: Callable[[], torch.Tensor], hosts: Sequence[str], calls: int
) -> tuple[int, int, float, torch.Tensor]:
    """Messages between and inside hosts of one call, bytes between them, and its result."""
    messages = [0, 0]
    dist.barrier()
    before = _sent_bytes()
    dist.barrier()
    with _messages_counted(messages, hosts):
        for _ in range(calls):
            result = way()
    dist.barrier()
    total = torch.tensor([*messages, _sent_bytes() - before], dtype=torch.float64)
    dist.all_reduce(total)
    between, inside, crossed = (total / calls).tolist()
    return round(between), round(inside), crossed, result


@contextmanager
def _messages_counted(messages: list[int], hosts: Sequence[str]) -> Iterator[None]:
    """Adds to `messages` those that this rank sends to other hosts, and to others of its own."""
    all_to_all, post = dist.all_to_all_single, Hop.post

    def count(group: dist.ProcessGroup, peers: Sequence[int]) -> None:
        ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
        for rank in (ranks[peer] for peer in peers):
            if rank != me:
                messages[hosts[rank] == hosts[me]] += 1

    def counting_all_to_all(*args: Any, **kwargs: Any) -> Any:
        group, splits = kwargs["group"], kwargs["input_split_sizes"]
        count(group, range(group.size()) if splits is None else np.flatnonzero(splits).tolist())
        return all_to_all(*args, **kwargs)

    def counting_post(hop: Hop, source: Any, sends: Sequence[Segment], *rest: Any, **options: Any):
        count(hop.group, [s.peer for s in sends if s.stop > s.start])
        return post(hop, source, sends, *rest, **options)

    with (
        patch.object(dist, "all_to_all_single", counting_all_to_all),
        patch.object(Hop, "post", counting_post),
    ):
        yield


def _sent_bytes() -> int:
    """That this host has sent to others; counted once a host."""
    if os.environ["LOCAL_RANK"] != "0":
        return 0
    with open("/proc/self/net/dev") as counters:
        link = next(line for line in counters if line.lstrip().startswith("eth0:"))
    return int(link.split(":")[1].split()[8])


def table(
    groups: ExpertGroups,
    hosts: Sequence[str],
    algorithms: Sequence[str],
    cells: Sequence[dict[str, int]],
    chunks: int,
) -> list[dict[str, Any]]:
    """Equal-split exchanges of every size, over and over.

    Args:
        groups: of all ranks.
        hosts: of every rank.
        algorithms: names of `EXCHANGES`.
        cells: `pair_bytes`, `repeats` and `calls` of each.
        chunks: rounds of the traffic with remote nodes.
    """
    links = Links(groups, lambda: "the benchmark")
    results = []
    for cell in cells:
        width = min(cell["pair_bytes"], LONGEST_ROW_BYTES) // 4
        counts_PP = np.full((len(hosts), len(hosts)), cell["pair_bytes"] // (4 * width))
        rows = torch.rand(int(counts_PP[0].sum()), width)
        ways = {
            name: partial(EXCHANGES[name](links, chunks).move(counts_PP), rows)
            for name in algorithms
        }
        measured = measure(ways, hosts, cell["repeats"], cell["calls"], tolerance=0.0)
        results.append({name: asdict(way) for name, way in measured.items()})
    return results


def moe(
    groups: ExpertGroups,
    hosts: Sequence[str],
    algorithms: Sequence[str],
    layer: dict[str, int],
    repeats: int,
    chunks: int,
) -> dict[str, Any]:
    """Dispatch and combine of one layer, uniform routing.

    Args:
        groups: of all ranks.
        hosts: of every rank.
        algorithms: Piper's; `megatron` for Megatron's own.
        layer: `experts`, `topk`, `hidden`, and `tokens` of a rank.
        repeats: how often each has its turn.
        chunks: rounds of the traffic with remote nodes.
    """
    torch.manual_seed(dist.get_rank())
    hidden = torch.randn(layer["tokens"], 1, layer["hidden"])
    routing_map, probs = uniform_routing(
        layer["tokens"], layer["experts"], layer["topk"], hidden.device
    )
    dispatchers = build_dispatchers(
        groups,
        algorithms,
        experts=layer["experts"],
        topk=layer["topk"],
        hidden=layer["hidden"],
        chunks=chunks,
    )
    ways = {
        name: partial(round_trip, dispatcher, hidden, routing_map, probs)
        for name, dispatcher in dispatchers.items()
    }
    with torch.no_grad():
        measured = measure(ways, hosts, repeats, calls=1, tolerance=1e-5)
    return {
        "rows": _crossing_rows(routing_map, hosts),
        "ways": {name: asdict(m) for name, m in measured.items()},
    }


def _crossing_rows(routing_map: torch.Tensor, hosts: Sequence[str]) -> dict[str, int]:
    """Rows that all ranks send to other hosts: once an expert, and once a host."""
    experts_of_rank = routing_map.view(routing_map.shape[0], len(hosts), -1)
    here = hosts[dist.get_rank()]
    others = sorted(set(hosts) - {here})
    by_host = [experts_of_rank[:, [h == other for h in hosts]].flatten(1) for other in others]
    rows = torch.tensor(
        [sum(int(m.sum()) for m in by_host), sum(int(m.any(1).sum()) for m in by_host)]
    )
    dist.all_reduce(rows)
    once_an_expert, once_a_host = rows.tolist()
    return {"once_an_expert": once_an_expert, "once_a_host": once_a_host}


TASKS: dict[str, Callable[..., Any]] = {"table": table, "moe": moe}


def main() -> None:
    """Joins the other ranks, does the work, prints."""
    from piper_megatron.runtime import cpu

    cpu.enable()
    torch.set_num_threads(1)
    work = json.loads(sys.argv[1])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    groups = split_group(dist.group.WORLD, hosts, TIMEOUT)
    result = TASKS[work.pop("task")](groups, hosts, **work)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
