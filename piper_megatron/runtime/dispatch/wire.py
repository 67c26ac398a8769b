"""The two ways that rows travel: one collective, or messages between pairs of ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from piper_megatron.runtime.dispatch.rows import reordering
from piper_megatron.runtime.dispatch.stats import LayerRecorder, Stop, nothing


class TransferError(RuntimeError):
    """A hop of the token dispatcher failed; the message names layer, hop and peers."""


class Segment(NamedTuple):
    """Rows [start, stop) of a buffer that go to, or come from, a rank of the hop's group."""

    peer: int
    start: int
    stop: int


class Transfer:
    """Messages under way."""

    def __init__(
        self,
        hop: "Hop",
        receives: list[dist.Work],
        sends: list[dist.Work],
        peers: Sequence[int],
        arrived: Stop = nothing,
    ) -> None:
        self._hop, self._receives, self._sends = hop, receives, sends
        self._peers, self._arrived = peers, arrived

    def wait(self) -> None:
        """Returns when the received rows are there; on a GPU, for what is queued after it."""
        with self._hop.named(self._peers):
            for work in self._receives:
                work.wait()
        self._arrived()

    def finish(self) -> None:
        """Returns when the sent rows may be overwritten."""
        with self._hop.named(self._peers):
            for work in self._sends:
                work.wait()


@dataclass(frozen=True)
class Hop:
    """One leg of the way, over one group.

    Attributes:
        name: for messages.
        group: ranks that it joins.
        ranks: of each peer, its rank in the group.
        where: whose rows these are, for messages.
        between_nodes: whether each rank of the group is on another node than this one.
        recorder: counts what is sent, if anything does.
    """

    name: str
    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    where: Callable[[], str]
    between_nodes: tuple[bool, ...]
    recorder: LayerRecorder | None

    @cached_property
    def me(self) -> int:
        """This rank as a peer."""
        return self.ranks.index(self.group.rank())

    def all_to_all(
        self, rows: torch.Tensor, sent: np.ndarray, received: np.ndarray
    ) -> torch.Tensor:
        """One uneven all-to-all.

        RCCL hangs on a rank that sends or receives nothing at all; such a rank sends itself a row.

        Args:
            rows: [sum of sent, ...], ordered by peer.
            sent: rows for each peer.
            received: rows from each peer.

        Returns:
            [sum of received, ...], ordered by peer.
        """
        if self.group.size() == 1:
            return rows
        arrived = self._record(
            rows, [(p, n) for p, n in enumerate(sent.tolist()) if n and p != self.me]
        )
        by_rank = np.argsort(self.ranks).tolist()
        rows = reordering(sent, by_rank)(rows)
        sent, received = sent[by_rank], received[by_rank]
        guarded = not sent.sum() or not received.sum()
        if guarded:
            me = self.group.rank()
            own = np.arange(self.group.size()) == me
            place = int(sent[:me].sum())
            guard = rows.new_zeros(1, *rows.shape[1:])
            rows = torch.cat([rows[:place], guard, rows[place:]])
            sent, received = sent + own, received + own
        result = rows.new_empty(int(received.sum()), *rows.shape[1:])
        involved = sent + received
        with self.named([p for p, r in enumerate(self.ranks) if involved[r] and p != self.me]):
            # asynchronous: on a GPU it then runs on the group's own stream
            dist.all_to_all_single(
                result,
                rows.contiguous(),
                output_split_sizes=received.tolist(),
                input_split_sizes=sent.tolist(),
                group=self.group,
                async_op=True,
            ).wait()
        arrived()
        if guarded:
            place = int(received[:me].sum())
            result = torch.cat([result[:place], result[place + 1 :]])
            received = received - own
        return reordering(received, self.ranks)(result)

    def nothing(self) -> Transfer:
        """A transfer that is done."""
        return Transfer(self, [], [], ())

    def post(
        self,
        source: torch.Tensor,
        sends: Sequence[Segment],
        target: torch.Tensor,
        receives: Sequence[Segment],
        tag: int,
    ) -> Transfer:
        """Starts messages between pairs of ranks; nothing is sent for an empty segment.

        Args:
            source: rows that `sends` cut.
            sends: segments in the order in which they start.
            target: rows that `receives` cut.
            receives: as many for a peer, in the same order, as that peer sends.
            tag: tells this batch from others under way between the same ranks.
        """
        me = self.me
        for kept, place in zip(_of(sends, me), _of(receives, me), strict=True):
            target[place.start : place.stop] = source[kept.start : kept.stop]
        sends, receives = (
            [s for s in segments if s.peer != me and s.stop > s.start]
            for segments in (sends, receives)
        )
        arrived = self._record(source, [(s.peer, s.stop - s.start) for s in sends])
        peers = sorted({s.peer for s in (*receives, *sends)})
        with self.named(peers):
            works = self._start(_cut(target, receives), _cut(source, sends), tag)
        return Transfer(self, *works, peers, arrived)

    def _start(
        self,
        receives: list[tuple[int, torch.Tensor]],
        sends: list[tuple[int, torch.Tensor]],
        tag: int,
    ) -> tuple[list[dist.Work], list[dist.Work]]:
        """Starts messages, each a peer and its rows; what to wait for, receives and sends.

        gloo's sender waits for word that the receive is posted; it must not queue on the link
        behind what other ranks of the host send, so receives come first.
        """
        group, ranks = self.group, self.ranks
        if self._has_no_batches:
            return (
                [group.recv([rows], ranks[peer], tag) for peer, rows in receives],
                [group.send([rows], ranks[peer], tag) for peer, rows in sends],
            )
        operations = [
            dist.P2POp(kind, rows, group=group, tag=tag, group_peer=ranks[peer])
            for kind, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, rows in messages
        ]
        # one piece of work for all of them
        return (dist.batch_isend_irecv(operations) if operations else []), []

    @cached_property
    def _has_no_batches(self) -> bool:
        """Where torch sends a batch one by one, after checks that take longer than a short send."""
        return dist.get_backend(self.group) == "gloo"

    def _record(self, rows: torch.Tensor, messages: list[tuple[int, int]]) -> Stop:
        """Counts messages, each a peer and its rows; what is returned ends their time."""
        if self.recorder is None:
            return nothing
        return self.recorder.start(
            self.name, rows, [(count, self.between_nodes[peer]) for peer, count in messages]
        )

    @contextmanager
    def named(self, peers: Sequence[int]) -> Iterator[None]:
        """Says in an error of the backend which hop of which layer waited for whom."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            ranks = dist.get_process_group_ranks(self.group)
            waited = ", ".join(str(ranks[self.ranks[peer]]) for peer in peers) or "none"
            raise TransferError(
                f"token dispatcher, {self.where()}, hop {self.name}: rank {dist.get_rank()} "
                f"waited for ranks {waited}: {error}"
            ) from error


def finish(last: Sequence[Transfer], before: Sequence[Transfer]) -> None:
    """Ends an exchange.

    Args:
        last: messages that nobody has waited for.
        before: messages that have arrived here, and may not have where they were sent.
    """
    for transfer in last:
        transfer.wait()
    for transfer in (*last, *before):
        transfer.finish()


def consecutive(rows: np.ndarray) -> tuple[Segment, ...]:
    """Segments of a buffer that is ordered by peer.

    Args:
        rows: of each peer.
    """
    stops = np.cumsum(rows)
    return tuple(
        Segment(peer, int(stop - n), int(stop))
        for peer, (stop, n) in enumerate(zip(stops, rows, strict=True))
    )


def _cut(rows: torch.Tensor, segments: Sequence[Segment]) -> list[tuple[int, torch.Tensor]]:
    return [(s.peer, rows[s.start : s.stop]) for s in segments]


def _of(segments: Sequence[Segment], peer: int) -> list[Segment]:
    return [s for s in segments if s.peer == peer and s.stop > s.start]
