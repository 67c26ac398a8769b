"""Megatron's token dispatcher with another way between the ranks.

Legend: T tokens of this rank, E experts, P ranks of the expert group, e experts of a rank,
t ranks of the expert-tensor group, H hidden size, S rows sent, N rows received.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import (
    get_align_size_for_quantization,
    maybe_move_tensor_to_cpu,
    pad_routing_map,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from piper_megatron.runtime.dispatch.exchange import EXCHANGES, Exchange, Links, Route
from piper_megatron.runtime.dispatch.groups import ExpertGroups
from piper_megatron.runtime.dispatch.recall import note, recall
from piper_megatron.runtime.dispatch.relay import (
    RelayExchange,
    RelayRoute,
    SendPlan,
    announce,
    pair_places,
    split_census,
)
from piper_megatron.runtime.dispatch.rows import (
    Map,
    gather,
    linear,
    pack_bits,
    scatter,
    true_places,
    unpack_bits,
)
from piper_megatron.runtime.dispatch.stats import LayerRecorder

ALGORITHMS = (*EXCHANGES, "rail", "rbd")


class _PiperDispatcher(MoEAlltoAllTokenDispatcher):
    """What the dispatchers share: one census of counts, one copy of it to the host.

    Attributes:
        census: counts of all ranks, on the device until they are copied.
        plan_names: attributes that hold what is known once rows can travel.
    """

    plan_names: tuple[str, ...]

    def __init__(self, links: Links, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.links = links
        self.census: torch.Tensor | None = None
        # outputs of a CUDA graph that ends before rows travel
        self.cudagraph_attrs.append("census")
        self.shared_experts: Any = None
        self.tokens_per_expert: Any = None
        self._recalled = False

    def _recall(self) -> bool:
        """Whether a checkpoint runs the layer again; then its plan is that of the first run.

        The routing may come out another way there, by rounding: the plan includes what it was.
        """
        plan = recall(self)
        self._recalled = plan is not None
        self.__dict__.update(plan or {})
        return self._recalled

    def _gather_counts(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of all ranks, [P, t, n]: one all-gather, as Megatron's."""
        ranks = self.ep_size * self.tp_size
        if ranks == 1:
            return numbers.view(1, 1, -1)
        gathered = numbers.new_empty(ranks * numbers.numel())
        dist.all_gather_into_tensor(gathered, numbers, group=self.tp_ep_group)
        return gathered.view(self.ep_size, self.tp_size, -1)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        """Megatron's copy to the host, on its stream and at its point, with the census in it."""
        if self._recalled:
            return tokens_per_expert
        if point == self.cuda_dtoh_point and self.census is not None:
            side = self.cuda_dtoh_stream
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.census = maybe_move_tensor_to_cpu(self.census, record_stream=True)
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def token_dispatch(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends rows and their probabilities to the ranks of their experts."""
        self._queue_shared_experts()
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_ep_alltoall", self.tokens_per_expert
        )
        if not self._recalled:
            self._find_routes()
            note(self, {name: getattr(self, name) for name in self.plan_names})
        row_route, probs_route = self._routes()
        if self.links.recorder is not None:
            self.links.recorder.record_routed(self._pairs_between_nodes())
        rows = self._travel("dispatch", rows, row_route.send, row_route.bring_back)
        # launched between the rows and their probabilities, as Megatron does
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        # an edge of its own: the router's gradient does not wait for that of the rows
        probs = self._travel("dispatch", probs, probs_route.send, probs_route.bring_back)
        return rows, probs

    def token_combine(self, rows: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """Brings what the experts made of the rows back to the ranks of their tokens."""
        self._queue_shared_experts()
        route, _ = self._routes()
        rows = self._travel("combine", rows, route.bring_back, route.send)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(rows)
            self.shared_experts.post_forward_comm()
        return rows

    def _queue_shared_experts(self) -> None:
        """Has their stream wait for what is queued here; Megatron 0.17 has no method for it."""
        if self.shared_experts is not None:
            self.shared_experts.stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def _without_shared_experts(self) -> Iterator[None]:
        """For Megatron's own steps: in 0.17 they run the shared experts, which have run by then."""
        shared_experts, self.shared_experts = self.shared_experts, None
        yield
        self.shared_experts = shared_experts

    def _with_shared_experts(self, output: torch.Tensor) -> torch.Tensor:
        if self.shared_experts is not None:
            output += self.shared_experts.get_output()
        return output

    def _travel(self, direction: str, rows: torch.Tensor, there: Map, back: Map) -> torch.Tensor:
        if (recorder := self.links.recorder) is not None:
            there = recorder.during(direction, there)
            back = recorder.during(f"{direction}_backward", back)
        return linear(rows, there, back)

    def _pairs_between_nodes(self) -> int:
        """(token, expert) pairs of this rank whose expert is on another node."""
        raise NotImplementedError

    def _find_routes(self) -> None:
        """Makes what `_routes` returns; may communicate."""
        raise NotImplementedError

    def _routes(self) -> tuple[Any, Any]:
        """Ways of rows and of probabilities."""
        raise NotImplementedError


class MovingDispatcher(_PiperDispatcher):
    """`flat`, `2dh` or `halo`: the rows of Megatron's own permutation go another way."""

    plan_names = (
        "_map_TE",
        "_route",
        "tokens_per_expert",
        "num_out_tokens",
        "num_global_tokens_per_local_expert",
        "output_splits_tp",
    )

    def __init__(self, exchange: Exchange, *args: Any, **kwargs: Any) -> None:
        super().__init__(exchange.links, *args, **kwargs)
        self.exchange = exchange
        self._route: Route | None = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron's: permutes the rows to send, and their probabilities."""
        if not self._recall():
            self._map_TE = routing_map
        return super().dispatch_preprocess(hidden_states, self._map_TE, probs)

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Counts rows; sets what Megatron's permutations read, and the counts of all ranks.

        Args:
            routing_map: [T, E] experts of each token.

        Returns:
            [e] rows of each expert of this rank.
        """
        if self._recalled:
            return self.tokens_per_expert
        if self.drop_and_pad:
            tokens_per_expert = super().preprocess(routing_map)
            rows = self.capacity * self.num_local_experts
            self._route = Route(self.exchange, np.full((self.ep_size, self.ep_size), rows))
            return tokens_per_expert
        counts_E = routing_map.sum(0, dtype=torch.long)
        counts_PtE = self._gather_counts(counts_E)
        here = counts_PtE[:, :, self.local_expert_indices[0] :][:, :, : self.num_local_experts]
        here_tPe = here.transpose(0, 1)
        dropless = (
            self.config.moe_expert_capacity_factor is None
            and not self.config.moe_router_padding_for_quantization
        )
        if dropless:
            self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        else:
            self.num_out_tokens = counts_E.sum()
            self._maybe_update_cuda_sync_point("before_permutation_1")
        self.output_splits_tp = here_tPe.sum((1, 2))
        self.num_global_tokens_per_local_expert = here_tPe.reshape(-1, self.num_local_experts)
        self._maybe_update_cuda_sync_point("before_ep_alltoall")
        counts_PP = counts_PtE[:, self.tp_rank].view(self.ep_size, self.ep_size, -1).sum(2)
        self.census = counts_PP.contiguous()
        return here.sum((0, 1))

    def _find_routes(self) -> None:
        if self.census is not None:
            self._route = Route(self.exchange, self.census.numpy())
            self.census = None

    def _routes(self) -> tuple[Route, Route]:
        assert self._route is not None
        return self._route, self._route

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Megatron's: sorts rows by expert."""
        with self._without_shared_experts():
            return super().dispatch_postprocess(rows, probs)

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Megatron's: adds up what became of each token, and the shared experts' output."""
        with self._without_shared_experts():
            output = super().combine_postprocess(rows)
        return self._with_shared_experts(output)

    def _pairs_between_nodes(self) -> int:
        route, _ = self._routes()
        return int(route.counts_PP[self.ep_rank, self.links.whole.between_nodes].sum())


class RelayDispatcher(_PiperDispatcher):
    """`rail` or `rbd`: a token crosses to a node once, sums cross back."""

    plan_names = ("_plan", "_numbers", "_route", "tokens_per_expert")

    def __init__(self, exchange: RelayExchange, *args: Any, **kwargs: Any) -> None:
        super().__init__(exchange.links, *args, **kwargs)
        self.exchange = exchange
        # padded rows are in the routing map, and the exchange takes any map
        self.drop_and_pad = False
        # the number of rows to send is not known before
        self._maybe_update_cuda_sync_point("before_permutation_1")
        # Megatron's copy to the host looks for them
        self.num_out_tokens = None
        self.num_global_tokens_per_local_expert = None
        members = exchange.groups.flat_members
        in_order = members == tuple(range(self.ep_size))
        self._members = None if in_order else torch.tensor(members, device="cuda")
        self._plan: SendPlan | None = None
        self._route: RelayRoute | None = None

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Counts rows and pairs for every relay; the census of all ranks.

        Args:
            routing_map: [T, E] experts of each token, ranks node by node.

        Returns:
            [e] rows of each expert of this rank.
        """
        exchange, here = self.exchange, self.exchange.groups
        table = exchange.table(routing_map)
        gathered = self._gather_counts(
            torch.cat([routing_map.sum(0, dtype=torch.int32), table.flatten()])
        )
        if self._members is not None:
            gathered = gathered[self._members]
        place = here.node_index * here.per_node + here.local_index
        experts = slice(place * self.num_local_experts, (place + 1) * self.num_local_experts)
        tokens_per_expert = gathered[:, :, experts].sum((0, 1), dtype=torch.long)
        tables_PtX = gathered[:, :, self.num_experts :]
        # rows and pairs that each rank of the expert-tensor group receives
        incoming = tables_PtX.unflatten(2, table.shape)[:, :, here.node_index].sum((0, 2, 3))
        received_2t = incoming[:, 1 + here.local_index :: here.per_node].T
        parts = [
            *exchange.census(tables_PtX[:, self.tp_rank]),
            ("received", received_2t),
        ]
        self.census = torch.cat([part.flatten() for _, part in parts])
        self._sizes = {name: tuple(part.shape) for name, part in parts}
        return tokens_per_expert

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Picks the rows to send.

        Args:
            hidden_states: [..., H] of T tokens.
            routing_map: [T, E] experts of each token.
            probs: [T, E] their probabilities.

        Returns:
            Rows [S, H] and the probability of each pair, both in the order in which they leave.
        """
        self.hidden_shape = hidden_states.shape
        self.probs = probs
        self.routing_map = routing_map
        x_TH = hidden_states.reshape(-1, self.hidden_shape[-1])
        if self.config.moe_router_padding_for_quantization:
            self.routing_map = pad_routing_map(
                routing_map, get_align_size_for_quantization(self.config)
            )
        map_TE = self._node_by_node(self.routing_map)
        if not self._recall():
            self.tokens_per_expert = self.preprocess(map_TE)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_permutation_1", self.tokens_per_expert
        )
        if self.census is not None:
            self._numbers = split_census(self.census, self._sizes)
            self.census = None
            self._plan = self.exchange.plan(map_TE, self._numbers)
        assert self._plan is not None
        pairs = self._node_by_node(probs).reshape(-1).index_select(0, self._plan.pair)
        return gather(x_TH, self._plan.token_S), pairs

    def _node_by_node(self, per_expert_TE: torch.Tensor) -> torch.Tensor:
        """Experts in the order of their ranks, node by node."""
        if self._members is None:
            return per_expert_TE
        by_rank = per_expert_TE.unflatten(1, (self.ep_size, -1))
        return by_rank[:, self._members].flatten(1)

    def _find_routes(self) -> None:
        assert self._plan is not None
        go = announce
        if self.links.recorder is not None:
            go = self.links.recorder.during("dispatch", announce)
        self._route = go(self._plan, self.links)

    def _routes(self) -> tuple[Any, Any]:
        assert self._route is not None
        return self._route.rows, self._route.pairs

    def _pairs_between_nodes(self) -> int:
        groups = self.exchange.groups
        pairs_MJCg = self._numbers["sent"][..., 1 + groups.per_node :]
        return int(pairs_MJCg.sum() - pairs_MJCg[groups.node_index].sum())

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copies rows for each expert of this rank that they go to.

        Args:
            rows: [N, H] that came.
            probs: of each pair that came.

        Returns:
            Rows by expert, [e] how many, and the probability of each.
        """
        assert self._route is not None
        bits_Ne = self._route.bits_Ne
        if self.tp_size > 1:
            rows_t, pairs_t = self._numbers["received"].tolist()
            rows = self._gather_slices(rows, rows_t)
            probs = self._gather_slices(probs, pairs_t)
            packed = self._gather_slices(pack_bits(bits_Ne), rows_t)
            bits_Ne = unpack_bits(packed, self.num_local_experts)
        tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_finish", self.tokens_per_expert
        )
        self.tokens_per_expert = None
        pairs = int(tokens_per_expert.sum())
        self._received = rows.shape[0]
        self._row_of_pair = true_places(bits_Ne.T, pairs) % max(self._received, 1)
        by_expert = pair_places(bits_Ne, (1, 0), pairs)
        return (
            gather(rows, self._row_of_pair),
            tokens_per_expert,
            probs.index_select(0, by_expert),
        )

    def _gather_slices(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return gather_from_sequence_parallel_region(
            rows, group=self.tp_group, output_split_sizes=counts
        )

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Adds up what this rank's experts made of each row.

        Args:
            hidden_states: rows by expert, weighted with their probabilities.

        Returns:
            [N, H]
        """
        rows = scatter(hidden_states, self._row_of_pair, self._received)
        if self.tp_size > 1:
            rows = reduce_scatter_to_sequence_parallel_region(
                rows.to(self.probs.dtype),
                group=self.tp_group,
                input_split_sizes=self._numbers["received"][0].tolist(),
            ).to(hidden_states.dtype)
        return rows

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Adds up what came back from each node, and the shared experts' output.

        Args:
            rows: [S, H]

        Returns:
            The layer's output, in the shape of its input.
        """
        assert self._plan is not None
        output = scatter(rows, self._plan.token_S, self.routing_map.shape[0])
        return self._with_shared_experts(output.view(self.hidden_shape))


@dataclass(frozen=True)
class DispatcherSpec:
    """What a dispatcher is made of, for all layers of a job.

    Attributes:
        algorithm: one of `ALGORITHMS`.
        groups: the expert group on its nodes.
        chunks: rounds of the traffic with remote nodes, for `halo` and `rail`.
    """

    algorithm: str
    groups: ExpertGroups
    chunks: int = 1

    def build(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: ProcessGroupCollection,
        where: Callable[[], str] = lambda: "a layer",
        recorder: LayerRecorder | None = None,
    ) -> MoEAlltoAllTokenDispatcher:
        """A dispatcher, with the arguments of Megatron's own.

        Args:
            num_local_experts: e.
            local_expert_indices: of this rank.
            config: Megatron's TransformerConfig.
            pg_collection: with `ep`, `expt_tp`, `tp_ep`.
            where: names the layer in messages.
            recorder: counts what is sent, if anything does.
        """
        links = Links(self.groups, where, recorder)
        megatron = (num_local_experts, local_expert_indices, config, pg_collection)
        if self.algorithm in EXCHANGES:
            return MovingDispatcher(EXCHANGES[self.algorithm](links, self.chunks), *megatron)
        pilots = self.algorithm == "rbd"
        # pilots are spread over the node: there is little that parts of the rows could overlap
        chunks = 1 if pilots else self.chunks
        return RelayDispatcher(RelayExchange(links, chunks, pilots), *megatron)
