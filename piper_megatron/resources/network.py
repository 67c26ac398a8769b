"""Seconds of collectives on a platform's network levels, for groups of a given reach.

What a rank sends flows through the links of every level that it leaves, all at once, and the
slowest decides. A level's bandwidth is what each rank gets when all ranks send, so NICs that ranks
share and tapers are part of it; the curve is that of `platform/transfer.py`. Arguments may be
arrays [layouts].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from piper_megatron.layout.collectives import Collective, Operation
from piper_megatron.layout.sizes import Number
from piper_megatron.platform.platform import Platform
from piper_megatron.platform.transfer import Transfer
from piper_megatron.resources.reach import Reach, domain_sizes

# these write to all peers from one kernel, without a message to each
_ONE_KERNEL = ("deepep", "hybridep")


@dataclass(frozen=True)
class Cost:
    """What an exchange costs a rank.

    Attributes:
        seconds: until it is done.
        bytes_by_level: that it sends to receivers which it meets at each level, innermost first.
        messages: that it sends.
    """

    seconds: Number
    bytes_by_level: tuple[Number, ...]
    messages: Number

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.seconds + other.seconds, *_sums(self, other))

    def beside(self, other: "Cost") -> "Cost":
        """Both at the same time, on different links."""
        return Cost(np.maximum(self.seconds, other.seconds), *_sums(self, other))


def _sums(one: Cost, other: Cost) -> tuple[tuple[Number, ...], Number]:
    sent = zip(one.bytes_by_level, other.bytes_by_level, strict=True)
    return tuple(a + b for a, b in sent), one.messages + other.messages


def no_cost(platform: Platform) -> Cost:
    """Of nothing."""
    return Cost(0.0, (0.0,) * len(platform.levels), 0)


def collective_cost(platform: Platform, reach: Reach, collective: Collective) -> Cost:
    """Cost of one collective in a group.

    Args:
        platform: levels and curves.
        reach: of the group.
        collective: operation and size.
    """
    sent = collective.sent_bytes(reach.members)
    # as much as goes to each other member, in each of the two rounds of an all-reduce
    own = sent / np.maximum(reach.members - 1, 1)
    match collective.operation:
        case Operation.ALL_TO_ALL:
            return all_to_all_cost(platform, reach, sent, own)
        case Operation.SEND_RECEIVE:
            return neighbours_cost(platform, reach, sent)
    return _ring_cost(platform, reach, collective.operation, sent, own)


def all_to_all_cost(
    platform: Platform,
    reach: Reach,
    sent_bytes: Number,
    own_bytes: Number = 0.0,
    *,
    kernel: str = "all_to_all",
    rounds: Number = 1,
) -> Cost:
    """Cost of an exchange of every member with every other one, or of one round of it.

    Args:
        platform: levels and curves.
        reach: of the group.
        sent_bytes: that a member sends to others, in all rounds.
        own_bytes: that it keeps.
        kernel: field of `transfer.Efficiency` that holds.
        rounds: each with an equal part of the bytes and of the peers.
    """
    leaving = reach.leaving_all_to_all()
    inside = [1, *(reach.inside(i) for i in range(len(reach.domains)))]
    peers = [inside[i + 1] - inside[i] for i in range(len(reach.domains))]
    if kernel in _ONE_KERNEL:
        peers = [np.minimum(count, 1) for count in peers]
    peers = [count / rounds for count in peers]
    sent, own = sent_bytes / rounds, own_bytes / rounds
    return _cost(platform, reach, leaving, peers, sent, own, kernel, at_once=True)


def neighbours_cost(platform: Platform, reach: Reach, sent_bytes: Number) -> Cost:
    """Cost of passing parts on to the next member, as often as there are others.

    Whoever has its neighbour in another domain sends everything through its own share of the links.
    """
    leaves = [np.greater(n, 1) * 1.0 for n in (reach.members, *reach.domains[:-1])]
    steps = _at_outermost(leaves, reach.members - 1)
    cost = _cost(platform, reach, leaves, steps, sent_bytes, 0.0, "point_to_point")
    return Cost(
        cost.seconds, _met(reach.leaving_ring(), sent_bytes), (reach.members - 1) * leaves[0]
    )


def message_cost(platform: Platform, reach: Reach, message_bytes: Number) -> Cost:
    """Cost of one message between neighbours in a group, the mean over all such pairs."""
    pairs = np.maximum(reach.members - 1, 1)
    crossing = [reach.members - 1, *(domains - 1 for domains in reach.domains[:-1])]
    leaving = [crossed / pairs for crossed in crossing]
    seconds: Number = 0.0
    for i, met in enumerate(_met(leaving, 1.0)):
        level, transfer = platform.levels[i], platform.transfers()[i]
        rate = level.gbps * 1e9 * transfer.efficiency.point_to_point
        busy = _ramped(message_bytes, transfer) / rate
        seconds = seconds + met * (transfer.startup_s + transfer.latency_s + busy)
    return Cost(seconds, _met(leaving, message_bytes), leaving[0])


def _ring_cost(
    platform: Platform, reach: Reach, operation: Operation, sent: Number, own: Number
) -> Cost:
    leaving = reach.leaving_ring()
    links = [share * reach.members for share in leaving]
    reduce_and_spread = operation is Operation.ALL_REDUCE
    steps = []
    for i, outer in enumerate([*links[1:], np.zeros_like(reach.members)]):
        if reduce_and_spread and i > platform.node_level:
            # trees between nodes: doi:10.1016/j.parco.2009.09.001
            steps.append(2 * (_log2(links[i]) - _log2(outer)))
        else:
            rounds = 2 if reduce_and_spread else 1
            steps.append(rounds * (links[i] - outer) * (1 - 1 / reach.members))
    return _cost(platform, reach, leaving, steps, sent, own, operation.value)


def _log2(count: Number) -> Number:
    return np.log2(np.maximum(count, 1))


def _at_outermost(leaves: Sequence[Number], steps: Number) -> list[Number]:
    """Puts all steps at the outermost level that is left."""
    beyond = [*leaves[1:], np.zeros_like(leaves[-1])]
    return [here * (1 - out) * steps for here, out in zip(leaves, beyond, strict=True)]


def _met(leaving: Sequence[Number], sent: Number) -> tuple[Number, ...]:
    """Bytes that meet their receiver at each level."""
    return tuple(
        (here - out) * sent for here, out in zip(leaving, [*leaving[1:], 0.0], strict=True)
    )


def _cost(
    platform: Platform,
    reach: Reach,
    leaving: Sequence[Number],
    steps: Sequence[Number],
    sent: Number,
    own: Number,
    efficiency: str,
    *,
    at_once: bool = False,
) -> Cost:
    """The curve of `platform/transfer.py` at every level that messages leave.

    Messages inside a node and between nodes follow each other, or are sent at once.
    """
    startup: Number = 0.0
    inside: Number = 0.0
    between: Number = 0.0
    busy: Number = 0.0
    for i, transfer in enumerate(platform.transfers()):
        share: Number = getattr(transfer.efficiency, efficiency)
        if efficiency == "all_to_all":
            share = share * _fan_out(transfer, reach, i)
        rate = platform.levels[i].gbps * 1e9 * share * _links(platform, transfer, reach, i)
        moved = leaving[i] * sent + transfer.own_share * own
        busy = np.maximum(busy, _ramped(moved, transfer) / rate)
        if i <= platform.node_level:
            inside = inside + steps[i] * transfer.latency_s
        else:
            between = between + steps[i] * transfer.latency_s
        startup = np.where(np.greater(leaving[i], 0), transfer.startup_s, startup)
    latency = np.maximum(inside, between) if at_once else inside + between
    seconds = np.where(np.greater(reach.members, 1), startup + latency + busy, 0.0)
    return Cost(seconds, _met(leaving, sent), sum(steps))


def _ramped(moved: Number, transfer: Transfer) -> Number:
    if not transfer.ramp_bytes:
        return moved
    return moved * (1 + transfer.ramp_bytes / (moved + transfer.ramp_bytes))


def _links(platform: Platform, transfer: Transfer, reach: Reach, level: int) -> Number:
    """Share of a rank's links that lead to members of its group."""
    size = domain_sizes(platform)[level]
    if not transfer.mesh or not size or size == 1:
        return 1.0
    return np.clip((reach.inside(level) - 1) / (size - 1), 1 / (size - 1), 1.0)


def _fan_out(transfer: Transfer, reach: Reach, level: int) -> Number:
    """What is left of the rate when ranks talk to many domains of the level inside."""
    if not transfer.fan_out or level == 0:
        return 1.0
    known = {1: 1.0} | dict(sorted(transfer.fan_out.items()))
    domains = np.log2(reach.domains[level - 1])
    return np.interp(domains, np.log2(list(known)), list(known.values()))
