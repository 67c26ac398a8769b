"""What the exchanges of `--piper-dispatcher` cost.

Two hops run at once where rows come in rounds: the node's own rows, then those of the other nodes
in m parts (runtime/dispatch/rounds.py). With F seconds of a part between nodes, O of the own rows
inside, and S of a part inside, a rank is done after

    max(O + m S, F + m S, m F + S)

since parts follow each other on either link, and a part is spread when it has arrived. The way back
is the mirror image and takes as long. More parts overlap better and start more messages.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from piper_megatron.layout.collectives import Collective, Operation, probability_bytes
from piper_megatron.layout.sizes import Number
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.dispatch_rows import (
    Distinct,
    Rows,
    expected,
    pairs_per_token,
    rows_per_token,
)
from piper_megatron.resources.network import Cost, all_to_all_cost, collective_cost, no_cost
from piper_megatron.resources.reach import Reach
from piper_megatron.workload.dispatcher_flags import CHUNKED
from piper_megatron.workload.spec import Experts, TrainingSpec

# parts that are tried
_CHUNKS = (1, 2, 4, 8)
# runtime/dispatch/dispatcher.py: counts of rows by expert alone, and with tables of relays
_COUNT_BYTES, _TABLE_BYTES = 8, 4


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """The exchanges of one MoE layer and micro-batch by one algorithm.

    Attributes:
        algorithm: one of `dispatcher_flags.ALGORITHMS`.
        platform: levels and curves.
        training: precision.
        experts: routed experts.
        reach: of the expert group.
        tokens: of a rank, those of the busiest one where load is uneven.
        row_bytes: of a token.
        chunks: parts of the traffic between nodes; None for as many as pay.
        reached: counted in a trace; None for uniform routing.
    """

    algorithm: str
    platform: Platform
    training: TrainingSpec
    experts: Experts
    reach: Reach
    tokens: Number
    row_bytes: int
    chunks: int | None = None
    reached: Distinct | None = None

    @property
    def nodes(self) -> Number:
        """Nodes, M."""
        return self.reach.domains[self.platform.node_level]

    @property
    def per_node(self) -> Number:
        """Members on a node, g."""
        return self.reach.members / self.nodes

    def round_trip(self) -> Cost:
        """Dispatch and combine of a forward pass, with what goes before."""
        return self.announcement(self.reach) + self.rows() + self.probabilities() + self.rows()

    def rows(self) -> Cost:
        """Rows of hidden states, one way."""
        return self._row_cost

    def probabilities(self) -> Cost:
        """Probabilities of dispatch, or their gradients: an exchange of their own."""
        return self._probability_cost

    @cached_property
    def _row_cost(self) -> Cost:
        return self._moved(self._rows(), self.row_bytes, self.best_chunks())

    @cached_property
    def _probability_cost(self) -> Cost:
        pairs = pairs_per_token(
            self.algorithm, self.experts.topk, self._reached(), self.nodes, self.per_node
        )
        return self._moved(pairs, probability_bytes(self.training), self.best_chunks())

    def announcement(self, gathered: Reach) -> Cost:
        """What goes before the rows of a forward pass: counts to all ranks, and for relays the
        experts of each row, one bit each.

        Args:
            gathered: of the ranks that tell each other counts, the tp-ep group.
        """
        if self.algorithm not in ("rail", "rbd"):
            return self._counts(gathered, _COUNT_BYTES * self.experts.count)
        chunks = self.best_chunks()
        relays = self.per_node if self.algorithm == "rbd" else 1
        table = self.nodes * relays * chunks * (1 + 2 * self.per_node)
        counts = self._counts(gathered, _TABLE_BYTES * (self.experts.count + table))
        rows = self._rows()
        of_node = np.ceil(self.experts.count / self.nodes / 8)
        of_rank = np.ceil(self.experts.count / self.reach.members / 8)
        inside, _ = split(self.reach, self.platform.node_level)
        far = self._far(rows, of_node * self.tokens, chunks)
        near = all_to_all_cost(
            self.platform, inside, (rows.near + rows.spread) * of_rank * self.tokens
        )
        return counts + _times(far, chunks) + near

    def best_chunks(self) -> Number:
        """Parts in which rows cross between nodes: as asked for, or as many as pay."""
        return self._best_chunks

    @cached_property
    def _best_chunks(self) -> Number:
        if self.algorithm not in CHUNKED:
            return 1
        tried = [self._legal(chunks) for chunks in ((self.chunks,) if self.chunks else _CHUNKS)]
        best = tried[0]
        rows = self._rows()
        seconds = self._moved(rows, self.row_bytes, best).seconds
        for chunks in tried[1:]:
            candidate = self._moved(rows, self.row_bytes, chunks).seconds
            best = np.where(np.less(candidate, seconds), chunks, best)
            seconds = np.minimum(candidate, seconds)
        return best

    def _legal(self, chunks: int) -> Number:
        """Rows of `rail` for one node fall into parts as well, those of `halo` do not."""
        most = self.nodes - 1 if self.algorithm == "halo" else np.where(self.nodes > 1, chunks, 1)
        return np.clip(chunks, 1, np.maximum(most, 1))

    def _reached(self) -> Distinct:
        return self.reached or expected(self.experts, self.nodes, self.per_node)

    def _rows(self) -> Rows:
        return rows_per_token(
            self.algorithm, self.experts.topk, self._reached(), self.nodes, self.per_node
        )

    def _moved(self, rows: Rows, item_bytes: int, chunks: Number) -> Cost:
        """The exchange of so many items for each token."""
        held = self.tokens * item_bytes
        inside, _ = split(self.reach, self.platform.node_level)
        far = self._far(rows, held, chunks)
        if self.algorithm == "flat":
            return far
        copies = _copies(self.platform, self.reach, rows.copied * held)
        if self.algorithm == "2dh":
            return all_to_all_cost(self.platform, inside, rows.spread * held) + far + copies
        own = all_to_all_cost(self.platform, inside, rows.near * held)
        spread = all_to_all_cost(self.platform, inside, rows.spread * held / chunks)
        spread = _where(self.nodes > 1, spread)
        return _in_rounds(far, own, spread, chunks) + copies

    def _far(self, rows: Rows, held: Number, chunks: Number) -> Cost:
        """One part of the first hop."""
        if self.algorithm in ("flat", "rbd"):
            sent = (rows.between + rows.beside) * held
            return all_to_all_cost(self.platform, self.reach, sent, held * self._kept(rows))
        _, rail = split(self.reach, self.platform.node_level)
        # a part is that of some nodes, or of one node's rows
        rounds = np.minimum(chunks, np.maximum(self.nodes - 1, 1))
        sent = rows.between * held * rounds / chunks
        return all_to_all_cost(self.platform, rail, sent, kernel="point_to_point", rounds=rounds)

    def _kept(self, rows: Rows) -> Number:
        """Rows of a token that a rank keeps in an all-to-all over the whole group."""
        return (rows.between + rows.beside) / np.maximum(self.reach.members - 1, 1)

    def _counts(self, gathered: Reach, count_bytes: Number) -> Cost:
        counts = Collective(
            "dispatch", "tp_ep", Operation.ALL_GATHER, count_bytes * gathered.members, "forward"
        )
        return collective_cost(self.platform, gathered, counts)


def split(reach: Reach, level: int) -> tuple[Reach, Reach]:
    """A group's members in one domain of a level, and those with one place in all domains."""
    domains = reach.domains[level]
    inside = tuple(
        n / domains if i <= level else np.ones_like(domains) for i, n in enumerate(reach.domains)
    )
    rail = tuple(domains if i <= level else n for i, n in enumerate(reach.domains))
    return Reach(reach.members / domains, inside), Reach(domains, rail)


def _in_rounds(far: Cost, own: Cost, spread: Cost, chunks: Number) -> Cost:
    """Of one part between nodes, of the node's own rows, and of one part inside."""
    f, o, s = far.seconds, own.seconds, spread.seconds
    seconds = np.maximum(np.maximum(o, f) + chunks * s, chunks * f + s)
    total = _times(far, chunks) + own + _times(spread, chunks)
    return Cost(seconds, total.bytes_by_level, total.messages)


def _times(cost: Cost, times: Number) -> Cost:
    return Cost(
        cost.seconds * times,
        tuple(sent * times for sent in cost.bytes_by_level),
        cost.messages * times,
    )


def _where(condition: Number, cost: Cost) -> Cost:
    return _times(cost, np.where(condition, 1, 0))


def _copies(platform: Platform, reach: Reach, copied_bytes: Number) -> Cost:
    """Passes over buffers that the exchange itself does not need; each byte is read and written.

    Of a machine of which only the network is known they are left out.
    """
    accelerator = platform.accelerator
    if accelerator is None:
        return no_cost(platform)
    rate = accelerator.hbm.gbps * 1e9 * accelerator.kernels.permute_efficiency
    seconds = np.where(np.greater(reach.members, 1), 2 * copied_bytes / rate, 0.0)
    return Cost(seconds, no_cost(platform).bytes_by_level, 0)
