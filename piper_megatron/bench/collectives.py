"""Calls over one network level: collectives of its rails and domains, messages between pairs."""

from typing import Any

import torch
import torch.distributed as dist

from piper_megatron.bench.clock import Call
from piper_megatron.bench.machine import Levels
from piper_megatron.bench.points import Point


def prepare(point: Point, level: Levels, device: torch.device) -> Call:
    """The call of a point; the ranks of a level make it at the same time.

    Sizes are those of `layout.collectives.Collective`: bytes of the tensor that the members have
    together, or of what one member holds in an all-to-all and sends in a message.
    """
    floats, members = point.size["bytes"] // 4, point.size["members"]
    if point.what == "point_to_point":
        return _messages(floats, level, point.size["pairs"], device)
    group = level.whole if point.what == "all_to_all_whole" else level.rail
    whole = torch.zeros(floats // members * members, device=device)
    part = torch.zeros(floats // members, device=device)
    match point.what:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case "all_gather":
            return lambda: dist.all_gather_into_tensor(whole, part, group=group)
        case "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    received = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(received, whole, group=group)


def _messages(floats: int, level: Levels, pairs: int, device: torch.device) -> Call:
    """Every member of a rail sends to the next one; only the first rails do."""
    sent, received = torch.zeros(2, floats, device=device).unbind()
    if level.rail_index >= pairs:
        return lambda: None
    ranks = dist.get_process_group_ranks(level.rail)
    place = ranks.index(dist.get_rank())
    following, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]

    def messages() -> None:
        operations: list[Any] = [
            dist.P2POp(dist.irecv, received, before, level.rail),
            dist.P2POp(dist.isend, sent, following, level.rail),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return messages
