"""How rows get to their experts and back.

Sources, megatron/core of 0.19.2: transformer/moe/token_dispatcher.py, transformer/moe/fused_a2a.py,
transformer/moe/moe_utils.py (`permute`, `unpermute`, `sort_chunks_by_idxs`); Transformer Engine
2.20: pytorch/permutation.py.
"""

import numpy as np

from piper_megatron.layout.sizes import Number
from piper_megatron.resources.activations.routing import (
    expert_rows,
    probability_bytes,
    sent_rows,
)
from piper_megatron.resources.activations.setup import FP32, INT32, INT64, Setup
from piper_megatron.resources.activations.tape import Tape, Tensor

PART = "dispatch"


class Dispatch:
    """One way there and back; `there` comes first.

    Attributes:
        held: tensors that variables of MoELayer.forward keep alive until it returns.
    """

    def __init__(self, tape: Tape, setup: Setup) -> None:
        """Args:
        tape: to write on.
        setup: of the layer.
        """
        self.held: list[Tensor] = []
        self._tape = tape
        self._setup = setup
        self._width = setup.experts.latent or setup.model.hidden
        self._fused = setup.te and setup.training.moe_permute_fusion
        self._row = self._width * setup.element
        self._local_experts = setup.experts.count / setup.sizes.ep

    def there(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the local experts, in their order, and the probability of each."""
        rows = expert_rows(self._setup)
        dispatched = self._tape.tensor("dispatched rows", rows * self._row)
        weights = self._tape.tensor("dispatched probabilities", rows * self._probability())
        self._there(hidden, probs, dispatched, weights)
        return dispatched, weights

    def back(self, rows: Tensor) -> Tensor:
        """Outputs of the experts, added up by token."""
        out = self._tape.tensor("combined", self._setup.shard * self._row)
        self._back(rows, out)
        return out

    def _there(self, hidden: Tensor, probs: Tensor, rows: Tensor, weights: Tensor) -> None:
        raise NotImplementedError

    def _back(self, rows: Tensor, out: Tensor) -> None:
        raise NotImplementedError

    def _probability(self) -> int:
        return probability_bytes(self._setup)

    def _when(self, condition: Number, bytes: Number) -> Number:
        """Bytes of a tensor that exists where the condition holds."""
        return np.where(condition, bytes, 0)

    def _row_map(self, tokens: Number, experts: Number) -> list[Tensor]:
        """Where each token's rows are, of the fused permutation; it serves both ways."""
        bytes = tokens * (2 * experts + 1) * INT32
        return [self._tape.tensor("row map", bytes, differentiable=False)]


class AllToAll(Dispatch):
    """Permute, exchange, gather over expert-tensor ranks, sort by local expert; and all of it back.

    Each step that a layout needs makes a copy; the last copy is what experts read.
    """

    def _there(self, hidden: Tensor, probs: Tensor, rows: Tensor, weights: Tensor) -> None:
        exchanged, gathered, sorted_ = self._steps()
        sent = sent_rows(self._setup)
        received = expert_rows(self._setup) / self._setup.sizes.etp
        before = (
            (self._when(exchanged | gathered | sorted_, sent), "permuted"),
            (self._when(exchanged & (gathered | sorted_), received), "received"),
            (self._when(gathered & sorted_, received * self._setup.sizes.etp), "gathered"),
        )
        maps = self._maps()
        direct = exchanged & ~(gathered | sorted_)
        between = self._between(received)
        buffers = {"received": self._when(~direct, between), "": self._when(direct, between)}
        source: list[Tensor] = [hidden, probs]
        for place, (count, name) in enumerate((*before, (None, ""))):
            if count is None:
                target = [rows, weights]
            else:
                target = [
                    self._tape.tensor(f"{name} rows", count * self._row),
                    self._tape.tensor(f"{name} probabilities", count * self._probability()),
                ]
            internals = [] if place else maps
            buffer = buffers.get(name, 0)
            self._tape.add(
                PART,
                source,
                [*target, *internals],
                internals,
                forward_extra=buffer,
                backward_extra=buffer,
            )
            if name in ("permuted", "received"):
                self.held.append(target[0])
            source = target
        if self._fused:
            self._keep_order("order of chunks")

    def _back(self, rows: Tensor, out: Tensor) -> None:
        exchanged, gathered, sorted_ = self._steps()
        returned = expert_rows(self._setup)
        scattered = returned / self._setup.sizes.etp
        for count, name in (
            (self._when(sorted_, returned), "unsorted"),
            (self._when(gathered, scattered), "scattered"),
            (self._when(exchanged, sent_rows(self._setup)), "returned"),
        ):
            # a step that a layout does not have hands its input on
            target = self._tape.tensor(f"{name} rows", count * self._row)
            buffer = self._between(scattered) if name == "returned" else 0
            self._tape.add(PART, [rows], [target], forward_extra=buffer, backward_extra=buffer)
            rows = target
        if self._fused:
            self._keep_order("order of chunks back")
        self._tape.add(PART, [rows], [out])

    def _between(self, rows: Number) -> Number:
        """Bytes of buffers in the middle of an exchange of so many rows."""
        return 0

    def _steps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which of exchange, gathering and sorting make a copy."""
        sizes = self._setup.sizes
        return (
            np.asarray(sizes.ep) > 1,
            np.asarray(sizes.etp) > 1,
            np.asarray(self._local_experts) > 1,
        )

    def _maps(self) -> list[Tensor]:
        setup, experts = self._setup, self._setup.experts
        sent = sent_rows(setup)
        if self._fused:
            return self._row_map(setup.shard, experts.count)
        indices = self._tape.tensor("order of rows", sent * INT64, differentiable=False)
        if experts.pad_to_capacity:
            of_probs: Number = sent * INT64
        else:
            # a slice of all pairs, sorted, which keeps all of them
            of_probs = setup.shard * experts.count * INT64
        return [indices, self._tape.tensor("order of pairs", of_probs, differentiable=False)]

    def _keep_order(self, name: str) -> None:
        sorted_ = np.asarray(self._local_experts) > 1
        bytes = self._when(sorted_, expert_rows(self._setup) * INT32)
        order = self._tape.tensor(name, bytes, differentiable=False)
        self._tape.add(PART, [], [order], [order])


class AllGather(Dispatch):
    """All tokens of the expert group come to every rank, which picks its experts' rows."""

    def _there(self, hidden: Tensor, probs: Tensor, rows: Tensor, weights: Tensor) -> None:
        setup, sizes = self._setup, self._setup.sizes
        alone = (np.asarray(sizes.ep) == 1) & (np.asarray(sizes.etp) == 1)
        everybody = setup.shard * sizes.ep * sizes.etp
        # tokens are gathered into Megatron's one buffer for it; their gradient is not
        whole = Tensor("gathered tokens", 0, self._when(~alone, everybody * self._row))
        pairs = everybody * setup.experts.count * self._probability()
        whole_probs = self._tape.tensor("gathered probabilities", self._when(~alone, pairs))
        local_pairs = everybody * self._local_experts
        local_probs = self._tape.tensor("local probabilities", local_pairs * self._probability())
        local_maps = self._tape.tensor("local map", local_pairs, differentiable=False)
        self._tape.add(PART, [hidden, probs], [whole, whole_probs])
        self._tape.add(PART, [whole_probs, probs], [local_probs])
        self._tape.add(PART, [local_probs], [weights, local_maps], [local_probs, local_maps])
        if self._fused:
            maps = self._row_map(everybody, self._local_experts)
        else:
            order = expert_rows(setup) * INT64
            maps = [self._tape.tensor("order of rows", order, differentiable=False)]
        self._tape.add(PART, [whole, hidden], [rows, *maps], maps)
        self._everybody, self._alone = everybody, alone

    def _back(self, rows: Tensor, out: Tensor) -> None:
        spread = self._tape.tensor(
            "rows by token", self._when(~self._alone, self._everybody * self._row)
        )
        in_router_precision = self._when(
            ~self._alone, self._everybody * self._width * self._probability()
        )
        self._tape.add(PART, [rows], [spread])
        self._tape.add(
            PART,
            [spread],
            [out],
            forward_extra=in_router_precision,
            backward_extra=in_router_precision,
        )


class DeepEP(Dispatch):
    """A token goes to each rank once, and is permuted for its experts there."""

    def _there(self, hidden: Tensor, probs: Tensor, rows: Tensor, weights: Tensor) -> None:
        setup = self._setup
        experts = setup.experts
        indices_bytes = setup.shard * experts.topk * INT64
        indices = self._tape.tensor("chosen experts", indices_bytes, differentiable=False)
        chosen = self._tape.tensor("chosen probabilities", setup.shard * experts.topk * FP32)
        self._tape.add(PART, [probs], [chosen, indices], [indices])
        tokens = setup.shard * self._ranks_of_a_token() * setup.imbalance
        received = self._tape.tensor("received tokens", tokens * self._row)
        self.held.append(received)
        pairs = tokens * self._local_experts
        received_probs = self._tape.tensor("received probabilities", pairs * FP32)
        self._tape.add(PART, [hidden, chosen], [received, received_probs])
        if self._fused:
            maps = self._row_map(tokens, self._local_experts)
        else:
            maps = [
                self._tape.tensor(name, bytes, differentiable=False)
                for name, bytes in (
                    ("order of rows", expert_rows(setup) * INT64),
                    ("order of pairs", pairs * INT64),
                )
            ]
        self._tape.add(PART, [received, received_probs], [rows, weights, *maps], maps)
        self._received = tokens * self._row

    def _back(self, rows: Tensor, out: Tensor) -> None:
        merged = self._tape.tensor("rows by token", self._received)
        self._tape.add(PART, [rows], [merged])
        self._tape.add(PART, [merged], [out])

    def _probability(self) -> int:
        return FP32  # all that the kernels take

    def _ranks_of_a_token(self) -> Number:
        """Expected number of expert ranks that a token's experts are on, chosen evenly."""
        experts, sizes = self._setup.experts, self._setup.sizes
        missed: Number = 1.0
        for drawn in range(experts.topk):
            others = experts.count - self._local_experts - drawn
            missed = missed * np.maximum(others, 0) / (experts.count - drawn)
        return sizes.ep * (1 - missed) * sizes.etp


class HybridEP(Dispatch):
    """Exchange and permutation in one operation, through buffers outside torch's allocator."""

    def _there(self, hidden: Tensor, probs: Tensor, rows: Tensor, weights: Tensor) -> None:
        self._tape.add(PART, [hidden, probs], [rows, weights])

    def _back(self, rows: Tensor, out: Tensor) -> None:
        self._tape.add(PART, [rows], [out])

    def _probability(self) -> int:
        return FP32  # all that the kernels take
