"""Megatron's own core attention, taught two things that it leaves to Transformer Engine.

Values may have another width than keys (multi-head latent attention), and the sequence may be
split over a context-parallel group: each rank keeps its queries and gathers all keys and values.
Megatron cuts a sequence into twice as many chunks as the group has ranks and gives rank r the
chunks r and, from the end, r, so that all ranks have as many pairs to attend to.

s: length of the sequence, c: size of the context-parallel group, b: micro-batch, h: heads of this
rank, d: width of a head.
"""

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from piper_megatron.runtime.hooks import Hook

SUMMARY = "core attention is Megatron's unfused one; with context parallelism it gathers all keys"

_CLASS = "megatron.core.transformer.dot_product_attention:DotProductAttention"


def chunks_of(rank: int, group_size: int) -> tuple[int, int]:
    """The two chunks of the sequence that a context-parallel rank holds, of 2 * `group_size`."""
    return rank, 2 * group_size - 1 - rank


def causal_rows(length: int, rank: int, group_size: int) -> torch.Tensor:
    """The rows of the causal mask that belong to a rank's queries.

    Args:
        length: of the whole sequence.
        rank: in the context-parallel group.
        group_size: of that group.

    Returns:
        [1, 1, s / c, s], True where a query must not look.
    """
    chunks = torch.arange(length).chunk(2 * group_size)
    queries = torch.cat([chunks[index] for index in chunks_of(rank, group_size)])
    return (torch.arange(length) > queries[:, None])[None, None]


def in_order(gathered: torch.Tensor, group_size: int) -> torch.Tensor:
    """Puts the chunks of all ranks, [s, ...] in the order of the ranks, into that of the tokens."""
    held = [index for rank in range(group_size) for index in chunks_of(rank, group_size)]
    chunks = dict(zip(held, gathered.chunk(2 * group_size), strict=True))
    return torch.cat([chunks[index] for index in sorted(chunks)])


def _accept(init: Callable) -> Callable:
    @wraps(init)
    def __init__(
        self: Any,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        unsplit = copy.copy(config)
        unsplit.context_parallel_size = 1
        init(self, unsplit, *args, **kwargs)
        self.config = config
        if v_channels is not None:
            # the width of the output; scores take the keys' width from the tensors themselves
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    return __init__


def _gather(forward: Callable) -> Callable:
    @wraps(forward)
    def gathered_forward(
        self: Any,
        query: torch.Tensor,  # [s / c, b, h, d]
        key: torch.Tensor,  # as the query, and so the value
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # [b, 1, s / c, s]
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.config.context_parallel_size > 1:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            group = self.pg_collection.cp
            # its gradient is the sum over the group, for each rank uses all keys
            key, value = (
                in_order(gather_from_sequence_parallel_region(tensor, group=group), group.size())
                for tensor in (key, value)
            )
            if attention_mask is None:
                attention_mask = causal_rows(len(key), group.rank(), group.size())
        return forward(self, query, key, value, attention_mask, *args, **kwargs)

    return gathered_forward


MEGATRON_HOOKS = (
    Hook("attention.widths", f"{_CLASS}.__init__", _accept),
    Hook("attention.split", f"{_CLASS}.forward", _gather),
)
