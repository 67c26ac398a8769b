"""The exchanges that send a token to a node once: `rail` and `rbd`.

A rank sends each of its tokens once to every node that holds one of its experts, to a relay there.
The relay hands the row to every rank of its node that needs it, once each. On the way back, the
relay adds up what the row became in its node before the sum crosses between nodes.

`rail` relays over the rank with the sender's own index on the node, so that a rank talks to one
rank a node. `rbd` relays over one of the ranks that need the row, its pilot (arXiv:2508.13337),
which needs no copy of it, and talks to all.

With the rows travel, for every row, one bit for each expert that it may still go to, and for every
(token, expert) pair one probability. Pairs go the same way as rows, by counts of their own.

Legend: T tokens of this rank, E experts, P ranks of the expert group = M nodes of g, e experts of
a rank, J relays on a node that take a rank's rows (1 or g), C parts of the tokens, S rows sent,
R rows relayed, N rows received. Experts are in the order of ranks node by node.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from piper_megatron.runtime.dispatch.exchange import Links
from piper_megatron.runtime.dispatch.groups import ExpertGroups
from piper_megatron.runtime.dispatch.rounds import Counts, Rounds, Schedule, lay_out, schedule
from piper_megatron.runtime.dispatch.rows import pack_bits, true_places, unpack_bits


def split_census(numbers: torch.Tensor, sizes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """What a rank must know of all others, by name.

    Args:
        numbers: integers on the host: the parts, one after the other.
        sizes: the shape of each part.
    """
    ends = np.cumsum([math.prod(shape) for shape in sizes.values()])
    parts = np.split(numbers.numpy().astype(np.int64), ends[:-1])
    return {
        name: part.reshape(shape) for (name, shape), part in zip(sizes.items(), parts, strict=True)
    }


@dataclass(frozen=True)
class SendPlan:
    """What a rank sends.

    Attributes:
        rows: the way of rows, without their fan-out.
        pairs: the way of (token, expert) pairs, without their fan-out.
        rows_on: [g, rounds] rows that this rank, as a relay, hands to each member of its node.
        pairs_on: [g, rounds] pairs.
        token_S: token of each sent row.
        pair: [pairs sent] place of each pair in the flat probabilities [T, E].
        bits_SW: experts of the row's node that it goes to, W = g e.
    """

    rows: Rounds
    pairs: Rounds
    rows_on: np.ndarray
    pairs_on: np.ndarray
    token_S: torch.Tensor
    pair: torch.Tensor
    bits_SW: torch.Tensor


@dataclass(frozen=True)
class RelayExchange:
    """`rail`, or `rbd` when rows go through pilots.

    Attributes:
        links: hops to take.
        chunks: rounds of the traffic with remote nodes.
        pilots: whether the relay of a row is one of the ranks that need it.
    """

    links: Links
    chunks: int
    pilots: bool

    @property
    def groups(self) -> ExpertGroups:
        """The expert group on its nodes."""
        return self.links.groups

    @property
    def relays(self) -> int:
        """J."""
        return self.groups.per_node if self.pilots else 1

    @property
    def parts(self) -> int:
        """C."""
        return self._schedule.parts_in_all

    @cached_property
    def _schedule(self) -> Schedule:
        return schedule(self.groups.nodes, self.chunks, divisible=True)

    def table(self, map_TE: torch.Tensor) -> torch.Tensor:
        """What this rank tells the others: [M, J, C, 1 + 2 g] int32.

        For every relay and part of the tokens: rows, then rows and pairs for each member of the
        relay's node.
        """
        pairs_TMg = self._by_member(map_TE).sum(3, dtype=torch.float32)
        need_TMg = pairs_TMg.bool()
        relay_TMJ = self._relays(need_TMg).float()
        tables = []
        for relay, need, pairs in zip(
            *(t.tensor_split(self.parts) for t in (relay_TMJ, need_TMg.float(), pairs_TMg)),
            strict=True,
        ):
            rows = relay.sum(0).unsqueeze(-1)
            # exact in fp32, as sums of few thousand ones
            with torch.autocast(map_TE.device.type, enabled=False):
                rows_on = torch.einsum("tmj,tml->mjl", relay, need)
                pairs_on = torch.einsum("tmj,tml->mjl", relay, pairs)
            tables.append(torch.cat([rows, rows_on, pairs_on], -1))
        return torch.stack(tables, 2).int()

    def _by_member(self, map_TE: torch.Tensor) -> torch.Tensor:
        return map_TE.unflatten(1, (self.groups.nodes, self.groups.per_node, -1))

    def _relays(self, need_TMg: torch.Tensor) -> torch.Tensor:
        """[T, M, J] which relay of a node takes the token, if any."""
        if not self.pilots:
            return need_TMg.any(2, keepdim=True)
        # token t takes the (t mod n)-th of the n ranks that need it: even, and the same again when
        # the forward pass is recomputed
        rank_TMg = need_TMg.cumsum(2)
        tokens_T11 = torch.arange(need_TMg.shape[0], device=need_TMg.device)[:, None, None]
        chosen_TM1 = tokens_T11 % rank_TMg[:, :, -1:].clamp(min=1) + 1
        return need_TMg & (rank_TMg == chosen_TM1)

    def census(self, tables_PX: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Of the tables of all ranks, what this rank must know.

        Args:
            tables_PX: [P, M J C (1 + 2 g)] `table` of every rank, node by node.
        """
        groups, relays = self.groups, self.relays
        nodes, per_node = groups.nodes, groups.per_node
        tables = tables_PX.view(nodes, per_node, nodes, relays, self.parts, -1)
        here = tables[:, :, groups.node_index]  # [M, g, J, C, V] what comes to my node
        # [g, M, J, C, V] by relay; on a rail, the relay's index is the sender's
        at_relays = here.permute(2, 0, 1, 3, 4) if self.pilots else here.permute(1, 0, 2, 3, 4)
        mine = tables[groups.node_index, groups.local_index]
        return [("at_relays", at_relays), ("sent", mine)]

    def plan(self, map_TE: torch.Tensor, numbers: dict[str, np.ndarray]) -> SendPlan:
        """Where every row and pair of this rank goes, and how many of others pass through it.

        Args:
            map_TE: experts of each token.
            numbers: the parts of `census`, on the host.
        """
        g = self.groups.per_node
        far = self.links.whole if self.pilots else self.links.rail
        at_relays, sent = numbers["at_relays"], numbers["sent"]
        relayed = at_relays[self.groups.local_index]
        me = self.groups.local_index

        def counts(first: int, total: np.ndarray, arrived: np.ndarray) -> Counts:
            members = slice(first, first + g)
            return Counts(total, arrived, relayed[..., members], at_relays[..., first + me])

        rows, rows_on = lay_out(
            counts(1, sent[..., 0], relayed[..., 0]),
            self._schedule,
            self.groups,
            far,
            self.links.node,
        )
        pairs, pairs_on = lay_out(
            counts(1 + g, sent[..., 1 + g :].sum(-1), relayed[..., 1 + g :].sum(-1)),
            self._schedule,
            self.groups,
            far,
            self.links.node,
        )
        return SendPlan(
            rows, pairs, rows_on, pairs_on, *self._rows_to_send(map_TE, rows.sent, pairs.sent)
        )

    def _rows_to_send(
        self, map_TE: torch.Tensor, rows: int, pairs: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token, pairs and experts of the sent rows, by relay, then by token."""
        tokens, experts = map_TE.shape
        map_TMge = self._by_member(map_TE)
        relay_TMJ = self._relays(map_TMge.any(3))
        place_S = true_places(relay_TMJ.permute(1, 2, 0), rows)
        token_S, node_S = place_S % tokens, place_S // (tokens * self.relays)
        bits_SW = map_TE.unflatten(1, (self.groups.nodes, -1))[token_S, node_S]
        width = bits_SW.shape[1]
        place = true_places(bits_SW, pairs)
        row, bit = place // width, place % width
        pair = token_S[row] * experts + node_S[row] * width + bit
        return token_S, pair, bits_SW


@dataclass(frozen=True)
class RelayRoute:
    """The way of the rows of one layer and micro-batch, with every relay's part in it.

    Attributes:
        rows: the way of rows.
        pairs: the way of pairs.
        bits_Ne: experts of this rank that each received row goes to.
    """

    rows: Rounds
    pairs: Rounds
    bits_Ne: torch.Tensor


def announce(plan: SendPlan, links: Links) -> RelayRoute:
    """Sends the bits ahead of the rows, so that relays know whom to hand them to."""
    g = links.groups.per_node
    width = plan.bits_SW.shape[1]
    bits_Rge = unpack_bits(plan.rows.relay_only(pack_bits(plan.bits_SW)), width).unflatten(
        1, (g, -1)
    )
    need_gR = bits_Rge.any(2).T
    relayed = need_gR.shape[1]
    place = true_places(need_gR, int(plan.rows_on.sum()))
    member, row = place // relayed, place % relayed
    bits_Ne = unpack_bits(
        links.node.all_to_all(
            pack_bits(bits_Rge[row, member]), plan.rows_on.sum(1), plan.rows.received_from()
        ),
        width // g,
    )
    pair = pair_places(bits_Rge, (1, 0, 2), int(plan.pairs_on.sum()))
    return RelayRoute(
        plan.rows.with_fan_out(row, plan.rows_on),
        plan.pairs.with_fan_out(pair, plan.pairs_on),
        bits_Ne,
    )


def pair_places(bits: torch.Tensor, axes: tuple[int, ...], count: int) -> torch.Tensor:
    """Where the pairs of a mask are in row-major order, read in another order of its axes.

    Args:
        bits: one True for each pair.
        axes: the order of axes to read in, outermost first.
        count: number of pairs.

    Returns:
        [count] indices of pairs.
    """
    place = bits.flatten().cumsum(0).sub_(1).view(bits.shape)
    return place.permute(axes).reshape(-1)[true_places(bits.permute(axes), count)]
