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
from math import prod

import numpy as np
import torch

from piper_megatron.runtime.dispatch.groups import ExpertGroups
from piper_megatron.runtime.dispatch.rounds import Round, Rounds, schedule
from piper_megatron.runtime.dispatch.rows import reordering, transposition
from piper_megatron.runtime.dispatch.stats import BETWEEN, INSIDE, WHOLE, LayerRecorder
from piper_megatron.runtime.dispatch.wire import Hop, Segment, consecutive, finish


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

        by_index = reordering(counts_PP[me], grid.T.ravel().tolist())
        by_node = transposition(from_neighbours)
        by_source = reordering(from_all, np.argsort(grid.ravel()).tolist())

        def move(rows: torch.Tensor) -> torch.Tensor:
            rows = by_index(rows)
            rows = links.node.all_to_all(rows, for_index.sum(1), from_neighbours.sum(1))
            rows = by_node(rows)
            rows = links.rail.all_to_all(rows, from_neighbours.sum(0), from_all.sum(1))
            return by_source(rows)

        return move


# bytes that a rank sends another, in the mean, below which a message costs more than its bytes
_SHORT_BYTES = 8192


class Halo(Exchange):
    """Along the rails, then inside the node, beside the node's own rows (arXiv:2605.05049).

    Every message lands where it is sent on from, or where it stays: rows are never copied. Short
    rows are: the node's own then travel in one message with those that it passes on.
    """

    def move(self, counts_PP: np.ndarray) -> Move:
        """See `Exchange.move`."""
        in_rounds, in_few_messages = self._in_rounds(counts_PP), self._in_few_messages(counts_PP)
        rows_a_pair = counts_PP.mean()

        def move(rows: torch.Tensor) -> torch.Tensor:
            row_bytes = rows.dtype.itemsize * prod(rows.shape[1:])
            short = rows_a_pair * row_bytes < _SHORT_BYTES
            return in_few_messages(rows) if short else in_rounds(rows)

        return move

    def _in_few_messages(self, counts_PP: np.ndarray) -> Move:
        groups, links = self.links.groups, self.links
        grid = np.array(groups.members)
        me, x, j = groups.ep.rank(), groups.node_index, groups.local_index
        relayed = counts_PP[grid[:, j][:, None], grid[x]]  # [M, g] from each node to each neighbour
        from_all = counts_PP[grid, me]  # [M, g] in the end
        by_node = reordering(counts_PP[me], grid.ravel().tolist())
        by_index = transposition(relayed)
        by_source = reordering(from_all.T, np.argsort(grid.T.ravel()).tolist())
        far_sends = consecutive(counts_PP[me, grid].sum(1))
        far_receives = consecutive(relayed.sum(1))
        near_sends, near_receives = consecutive(relayed.sum(0)), consecutive(from_all.sum(0))
        passed_on, received = int(relayed.sum()), int(from_all.sum())

        def move(rows: torch.Tensor) -> torch.Tensor:
            here = rows.new_empty(passed_on, *rows.shape[1:])
            far = links.rail.post(by_node(rows), far_sends, here, far_receives, tag=0)
            result = rows.new_empty(received, *rows.shape[1:])
            far.wait()
            near = links.node.post(by_index(here), near_sends, result, near_receives, tag=0)
            finish([near], [far])
            return by_source(result)

        return move

    def _in_rounds(self, counts_PP: np.ndarray) -> Move:
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


EXCHANGES: dict[str, type[Exchange]] = {"flat": Flat, "2dh": TwoDimensional, "halo": Halo}
