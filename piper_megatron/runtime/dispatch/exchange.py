"""The exchanges that move every row to one place: `flat`, `2dh`, `halo`.

An all-to-all is its own adjoint with the counts transposed, so one function serves dispatch,
combine and both of their backward passes.

Legend: P ranks of the expert group = M nodes of g. `counts_PP[s, d]` rows from rank s to rank d, in
the order of the expert group; rows are ordered by destination before, by source after.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from piper_megatron.runtime.dispatch.groups import ExpertGroups
from piper_megatron.runtime.dispatch.rounds import Round, Rounds, schedule
from piper_megatron.runtime.dispatch.rows import reorder
from piper_megatron.runtime.dispatch.stats import BETWEEN, INSIDE, WHOLE, LayerRecorder
from piper_megatron.runtime.dispatch.wire import Hop, Segment


@dataclass(frozen=True)
class Links:
    """The hops that an exchange may take.

    Attributes:
        groups: the expert group on its nodes.
        where: whose rows these are, for messages.
        recorder: counts what is sent, if anything does.
    """

    groups: ExpertGroups
    where: Callable[[], str]
    recorder: LayerRecorder | None = None

    @cached_property
    def whole(self) -> Hop:
        """To any rank of the expert group, by its rank there."""
        neighbours = self.groups.members[self.groups.node_index]
        far = tuple(member not in neighbours for member in range(self.groups.ep.size()))
        return Hop(WHOLE, self.groups.ep, tuple(range(len(far))), self.where, far, self.recorder)

    @cached_property
    def node(self) -> Hop:
        """To a rank of this node, by its local index."""
        assert self.groups.node is not None
        far = (False,) * self.groups.per_node
        return Hop(INSIDE, self.groups.node, tuple(range(len(far))), self.where, far, self.recorder)

    @cached_property
    def rail(self) -> Hop:
        """To the rank of this local index on a node, by the node's index."""
        assert self.groups.rail is not None
        far = (True,) * self.groups.nodes
        return Hop(
            BETWEEN, self.groups.rail, self.groups.rail_ranks, self.where, far, self.recorder
        )


Move = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Exchange(ABC):
    """An all-to-all over an expert group.

    Attributes:
        links: hops to take.
        chunks: rounds of the traffic with remote nodes, where an exchange has rounds.
    """

    links: Links
    chunks: int

    @abstractmethod
    def move(self, counts_PP: np.ndarray) -> Move:
        """The all-to-all of these counts: takes rows by destination, gives rows by source."""


@dataclass(frozen=True)
class Route:
    """An exchange with the counts of one layer and micro-batch."""

    exchange: Exchange
    counts_PP: np.ndarray

    @cached_property
    def send(self) -> Move:
        """From the tokens' ranks to those of their experts."""
        return self.exchange.move(self.counts_PP)

    @cached_property
    def bring_back(self) -> Move:
        """The adjoint of `send`."""
        return self.exchange.move(self.counts_PP.T)


class Flat(Exchange):
    """One all-to-all over the expert group, as Megatron's own."""

    def move(self, counts_PP: np.ndarray) -> Move:
        """See `Exchange.move`."""
        hop = self.links.whole
        me = hop.group.rank()
        return lambda rows: hop.all_to_all(rows, counts_PP[me], counts_PP[:, me])


class TwoDimensional(Exchange):
    """Inside the node, then along the rail: fewer, longer messages (2DH, arXiv:2206.03382)."""

    def move(self, counts_PP: np.ndarray) -> Move:
        """See `Exchange.move`."""
        groups, links = self.links.groups, self.links
        grid = np.array(groups.members)
        me, x, j = groups.ep.rank(), groups.node_index, groups.local_index
        for_index = counts_PP[me, grid.T]  # [g, M] of my rows, by local index, then node
        from_neighbours = counts_PP[grid[x][:, None], grid[:, j]]  # [g, M] that come to me to go on
        from_all = counts_PP[grid, me]  # [M, g] in the end

        def move(rows: torch.Tensor) -> torch.Tensor:
            rows = reorder(rows, counts_PP[me], grid.T.ravel().tolist())
            rows = links.node.all_to_all(rows, for_index.sum(1), from_neighbours.sum(1))
            rows = _transpose(rows, from_neighbours)
            rows = links.rail.all_to_all(rows, from_neighbours.sum(0), from_all.sum(1))
            return reorder(rows, from_all.ravel(), np.argsort(grid.ravel()).tolist())

        return move


class Halo(Exchange):
    """Along the rails, then inside the node, beside the node's own rows (arXiv:2605.05049).

    Every message lands where it is sent on from, or where it stays: rows are never copied.
    """

    def move(self, counts_PP: np.ndarray) -> Move:
        """See `Exchange.move`."""
        groups, links = self.links.groups, self.links
        here = groups.node_index
        plan = schedule(groups.nodes, self.chunks, divisible=False)
        rounds = tuple(
            self._round(
                counts_PP,
                [(here + d) % groups.nodes for d in distances],
                [(here - d) % groups.nodes for d in distances],
            )
            for distances in plan.distances
        )
        me = groups.ep.rank()
        sent, received = int(counts_PP[me].sum()), int(counts_PP[:, me].sum())
        return Rounds(links.rail, links.node, rounds, sent, received).send

    def _round(self, counts_PP: np.ndarray, targets: list[int], sources: list[int]) -> Round:
        groups = self.links.groups
        me, j = groups.ep.rank(), groups.local_index
        ends_sent, ends_received = counts_PP[me].cumsum(), counts_PP[:, me].cumsum()

        def sent(member: int) -> tuple[int, int]:
            return int(ends_sent[member] - counts_PP[me, member]), int(ends_sent[member])

        far_sends: list[Segment] = []
        far_receives: list[Segment] = []
        near_sends: list[Segment] = []
        near_receives: list[Segment] = []
        relayed = 0
        for node in targets:
            members = groups.members[node]
            far_sends += _as_messages([Segment(node, *sent(m)) for m in members], members)
        for node in sources:
            arrivals = []
            for local, member in enumerate(groups.members[groups.node_index]):
                rows = int(counts_PP[groups.members[node][j], member])
                arrivals.append(Segment(node, relayed, relayed + rows))
                near_sends.append(Segment(local, relayed, relayed + rows))
                relayed += rows
            far_receives += _as_messages(arrivals, groups.members[groups.node_index])
            for local, source in enumerate(groups.members[node]):
                rows, stop = int(counts_PP[source, me]), int(ends_received[source])
                near_receives.append(Segment(local, stop - rows, stop))
        return Round(
            tuple(far_sends),
            tuple(far_receives),
            relayed,
            None,
            relayed,
            tuple(near_sends),
            tuple(near_receives),
        )


def _as_messages(segments: list[Segment], members: tuple[int, ...]) -> list[Segment]:
    """One message where the sender's rows for the members of a node lie side by side."""
    if members != tuple(range(members[0], members[0] + len(members))):
        return segments
    return [segments[0]._replace(stop=segments[-1].stop)]


def _transpose(rows: torch.Tensor, counts: np.ndarray) -> torch.Tensor:
    """Rows of a matrix of segments, [A, B] becomes [B, A]."""
    order = np.arange(counts.size).reshape(counts.shape).T.ravel()
    return reorder(rows, counts.ravel(), order.tolist())


EXCHANGES: dict[str, type[Exchange]] = {"flat": Flat, "2dh": TwoDimensional, "halo": Halo}
