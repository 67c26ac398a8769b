"""The way over two hops in rounds: between nodes, then inside the node, both at once.

A round is the traffic with some of the nodes. While the rows of one round are spread over the node,
those of the next are on their way between nodes. The first round is the node's own traffic, which
needs the second hop alone.

Nodes are taken in the order of their distance from the sender, so that nobody is everybody's first
target.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from piper_megatron.runtime.dispatch.groups import ExpertGroups
from piper_megatron.runtime.dispatch.rows import add_up
from piper_megatron.runtime.dispatch.wire import Hop, Segment, Transfer, consecutive, finish

# rounds whose messages are under way at once: enough to keep a link busy, few enough that the
# first of them is not slowed by the last
_WINDOW = 2


@dataclass(frozen=True)
class Round:
    """One round, seen from one rank, which is sender, relay and receiver at once.

    Attributes:
        far_sends: of the rows that this rank sends.
        far_receives: into the rows that it relays in this round.
        relayed: how many those are.
        fan_out: [fanned] of the relayed rows, those for each member of the node, member by member;
            None when they lie in that order already.
        fanned: rows that go on to members of the node.
        near_sends: of the fanned rows.
        near_receives: into the rows that this rank receives in the end.
    """

    far_sends: tuple[Segment, ...]
    far_receives: tuple[Segment, ...]
    relayed: int
    fan_out: torch.Tensor | None
    fanned: int
    near_sends: tuple[Segment, ...]
    near_receives: tuple[Segment, ...]

    def is_own(self, rank: int) -> bool:
        """Whether nothing goes over the first hop but what a rank hands to itself."""
        return len(self.far_sends) == 1 == len(self.far_receives) and (
            self.far_sends[0].peer == rank == self.far_receives[0].peer
        )


@dataclass(frozen=True)
class Rounds:
    """All rounds of an exchange.

    Attributes:
        far: the first hop.
        near: the second hop.
        rounds: the node's own traffic first.
        sent: rows that this rank sends.
        received: rows that it gets in the end.
    """

    far: Hop
    near: Hop
    rounds: tuple[Round, ...]
    sent: int
    received: int

    @property
    def relayed(self) -> int:
        """Rows that this rank relays, of all rounds."""
        return sum(r.relayed for r in self.rounds)

    def received_from(self) -> np.ndarray:
        """[g] rows that come to this rank in the end from each member of its node."""
        rows = np.zeros(len(self.near.ranks), np.int64)
        for r in self.rounds:
            for segment in r.near_receives:
                rows[segment.peer] += segment.stop - segment.start
        return rows

    def with_fan_out(self, index: torch.Tensor, counts: np.ndarray) -> "Rounds":
        """These rounds with the rows that go on.

        Args:
            index: of all relayed rows, those for each member of the node: by member, then by round.
            counts: [g, rounds] how many of them.
        """
        rounds = counts.shape[1]
        parts = index.split(counts.ravel().tolist())
        starts = np.cumsum([0] + [r.relayed for r in self.rounds])
        return replace(
            self,
            rounds=tuple(
                replace(r, fan_out=torch.cat(parts[i::rounds]) - int(starts[i]))
                for i, r in enumerate(self.rounds)
            ),
        )

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        """Takes rows to where they are needed; [sent, ...] to [received, ...]."""
        result = rows.new_empty(self.received, *rows.shape[1:])
        arrivals = _window(self.rounds, lambda i, r: self._post_far(i, r, rows))
        far, near = [], []
        for i, r in enumerate(self.rounds):
            relayed, transfer = next(arrivals)
            transfer.wait()
            far.append(transfer)
            fanned = relayed if r.fan_out is None else relayed.index_select(0, r.fan_out)
            near.append(self.near.post(fanned, r.near_sends, result, r.near_receives, tag=i))
        finish(near, far)
        return result

    def bring_back(self, rows: torch.Tensor) -> torch.Tensor:
        """The adjoint of `send`: sums of what each row became; [received, ...] to [sent, ...].

        Sums are taken inside the node, before rows cross back.
        """
        result = rows.new_empty(self.sent, *rows.shape[1:])
        # the node's own rows last: their sums are taken while others cross
        order = (*self.rounds[1:], self.rounds[0])
        arrivals = _window(order, lambda i, r: self._post_near_back(i, r, rows))
        near, far = [], []
        for i, r in enumerate(order):
            fanned, transfer = next(arrivals)
            transfer.wait()
            near.append(transfer)
            assert r.fan_out is not None
            summed = add_up(r.fan_out, r.relayed, fanned)
            far.append(self.far.post(summed, r.far_receives, result, r.far_sends, tag=i))
        finish(far, near)
        return result

    def relay_only(self, rows: torch.Tensor) -> torch.Tensor:
        """The first hop alone, of all rounds at once; [sent, ...] to [relayed, ...]."""
        relayed = rows.new_empty(self.relayed, *rows.shape[1:])
        start = 0
        transfers = []
        for i, r in enumerate(self.rounds):
            target = relayed[start : start + r.relayed]
            transfers.append(self.far.post(rows, r.far_sends, target, r.far_receives, tag=i))
            start += r.relayed
        finish(transfers, [])
        return relayed

    def _post_far(self, i: int, r: Round, rows: torch.Tensor) -> tuple[torch.Tensor, Transfer]:
        if r.is_own(self.far.me):
            own = r.far_sends[0]
            return rows[own.start : own.stop], self.far.nothing()
        relayed = rows.new_empty(r.relayed, *rows.shape[1:])
        return relayed, self.far.post(rows, r.far_sends, relayed, r.far_receives, tag=i)

    def _post_near_back(
        self, i: int, r: Round, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Transfer]:
        fanned = rows.new_empty(r.fanned, *rows.shape[1:])
        return fanned, self.near.post(rows, r.near_receives, fanned, r.near_sends, tag=i)


def _window(rounds: tuple[Round, ...], post: Callable[[int, Round], tuple[torch.Tensor, Transfer]]):
    """Yields what `post` returns for every round, started `_WINDOW` rounds ahead of its turn."""
    posted: deque[tuple[torch.Tensor, Transfer]] = deque()
    for i, r in enumerate(rounds):
        posted.append(post(i, r))
        if len(posted) > _WINDOW:
            yield posted.popleft()
    yield from posted


@dataclass(frozen=True)
class Schedule:
    """Which traffic belongs to which round; the same on all ranks of an expert group.

    Attributes:
        distances: of each round, the nodes it goes to, counted from the sender's.
        parts: of each round, the parts of the rows for those nodes.
    """

    distances: tuple[tuple[int, ...], ...]
    parts: tuple[slice, ...]

    @property
    def parts_in_all(self) -> int:
        """Parts that the rows for a node fall into."""
        return max(part.stop for part in self.parts)


def schedule(nodes: int, chunks: int, divisible: bool) -> Schedule:
    """The node's own traffic, then that with remote nodes in chunks.

    Args:
        nodes: M.
        chunks: rounds of remote traffic that are wanted.
        divisible: whether the rows for one node may fall into parts, when nodes are fewer.
    """
    remote = range(1, nodes)
    groups = [tuple(map(int, part)) for part in np.array_split(remote, min(chunks, nodes - 1) or 1)]
    groups = [group for group in groups if group]
    parts = -(-chunks // len(groups)) if divisible and groups else 1
    rounds: list[tuple[tuple[int, ...], slice]] = [((0,), slice(0, parts))]
    rounds += [(group, slice(part, part + 1)) for part in range(parts) for group in groups]
    distances, slices = zip(*rounds, strict=True)
    return Schedule(distances, slices)


@dataclass(frozen=True)
class Counts:
    """Rows of an exchange over relays, seen from one rank.

    J relays on each node take this rank's rows: one on the rail, or all g.

    Attributes:
        sent: [M, J, C] rows for each relay and part.
        relayed: [M, J, C, g] of the rows from each source and part that this rank relays, those
            for each member of its node.
        arrived: [M, J, C] rows from each source and part that this rank relays.
        received: [g, M, J, C] rows for this rank at each relay of its node, from each source and
            part.
    """

    sent: np.ndarray
    arrived: np.ndarray
    relayed: np.ndarray
    received: np.ndarray


def lay_out(
    counts: Counts, plan: Schedule, groups: ExpertGroups, far: Hop, near: Hop
) -> tuple[Rounds, np.ndarray]:
    """Cuts buffers into the segments of each round.

    Buffers are ordered: sent rows by relay and part; relayed rows by round, source and part;
    received rows by relay and round.

    Returns:
        Rounds without their fan-out, and [g, rounds] rows that go on to each member in each.
    """
    nodes, relays, _ = counts.sent.shape
    here = groups.node_index

    def peer(node: int, relay: int) -> int:
        return node if relays == 1 else groups.members[node][relay]

    starts = np.concatenate([[0], np.cumsum(counts.sent.ravel())])[:-1].reshape(counts.sent.shape)
    going_on = np.stack(
        [
            counts.relayed[[(here - d) % nodes for d in distances], :, parts].sum((0, 1, 2))
            for distances, parts in zip(plan.distances, plan.parts, strict=True)
        ],
        axis=1,
    )
    coming = np.stack(
        [
            counts.received[:, [(here - d) % nodes for d in distances], :, parts].sum((1, 2, 3))
            for distances, parts in zip(plan.distances, plan.parts, strict=True)
        ],
        axis=1,
    )
    coming_starts = (np.cumsum(coming.ravel()) - coming.ravel()).reshape(coming.shape)
    rounds = []
    for i, (distances, parts) in enumerate(zip(plan.distances, plan.parts, strict=True)):
        sends, receives, relayed = [], [], 0
        for distance in distances:
            for relay in range(relays):
                to, source = (here + distance) % nodes, (here - distance) % nodes
                start = int(starts[to, relay, parts.start])
                rows = int(counts.sent[to, relay, parts].sum())
                sends.append(Segment(peer(to, relay), start, start + rows))
                rows = int(counts.arrived[source, relay, parts].sum())
                receives.append(Segment(peer(source, relay), relayed, relayed + rows))
                relayed += rows
        rounds.append(
            Round(
                tuple(sends),
                tuple(receives),
                relayed,
                None,
                int(going_on[:, i].sum()),
                consecutive(going_on[:, i]),
                tuple(
                    Segment(member, int(start), int(start + rows))
                    for member, (start, rows) in enumerate(
                        zip(coming_starts[:, i], coming[:, i], strict=True)
                    )
                ),
            )
        )
    return (
        Rounds(far, near, tuple(rounds), int(counts.sent.sum()), int(coming.sum())),
        going_on,
    )
