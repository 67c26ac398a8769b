"""Linear maps of rows, each with its adjoint: what is differentiable is so by construction.

Legend: N rows that a map reads, R rows that it makes. Trailing dimensions pass through.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

Map = Callable[[torch.Tensor], torch.Tensor]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, forward: Map, adjoint: Map) -> torch.Tensor:
        ctx.adjoint = adjoint
        return forward(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.adjoint(gradient.contiguous()), None, None


def linear(rows: torch.Tensor, forward: Map, adjoint: Map) -> torch.Tensor:
    """Applies a linear map; gradients take its adjoint."""
    return _Linear.apply(rows, forward, adjoint)


def gather(rows: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """Row `index_R[r]` for every r; gradients of a row add up as in `add_up`."""
    return linear(rows, partial(take, index_R), partial(add_up, index_R, rows.shape[0]))


def scatter(rows: torch.Tensor, index_N: torch.Tensor, count: int) -> torch.Tensor:
    """Sums of the rows of equal index, [count, ...]; the adjoint of `gather`."""
    return linear(rows, partial(add_up, index_N, count), partial(take, index_N))


def take(index_R: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Row `index_R[r]` for every r."""
    return rows.index_select(0, index_R)


def add_up(index_N: torch.Tensor, count: int, rows: torch.Tensor) -> torch.Tensor:
    """Sums of the rows of equal index, [count, ...], in fp32 at least, rounded once at the end.

    On a GPU `index_add_` adds in any order. Where torch is to be deterministic, rows are sorted and
    summed segment by segment.
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if torch.are_deterministic_algorithms_enabled():
        return _segment_sums(index_N, count, wide).to(rows.dtype)
    sums = wide.new_zeros(count, *rows.shape[1:])
    return sums.index_add_(0, index_N, wide).to(rows.dtype)


def _segment_sums(index_N: torch.Tensor, count: int, rows: torch.Tensor) -> torch.Tensor:
    index_N, order_N = index_N.sort(stable=True)
    offsets = torch.searchsorted(index_N, torch.arange(count + 1, device=index_N.device))
    # unsafe: the check of offsets would wait for the device
    return torch.segment_reduce(rows[order_N], "sum", offsets=offsets, unsafe=True, initial=0)


def reordering(counts: np.ndarray, order: Sequence[int]) -> Map:
    """Segments of rows in another order.

    Args:
        counts: rows of each segment.
        order: which segment comes first, second, ...
    """
    if list(order) == list(range(len(order))):
        return lambda rows: rows
    sizes = counts.ravel().tolist()

    def reorder(rows: torch.Tensor) -> torch.Tensor:
        segments = rows.split_with_sizes(sizes)
        return torch.cat([segments[i] for i in order])

    return reorder


def transposition(counts: np.ndarray) -> Map:
    """Segments of rows that are a matrix, column by column.

    Args:
        counts: [A, B] rows of each segment.
    """
    return reordering(counts, np.arange(counts.size).reshape(counts.shape).T.ravel().tolist())


def true_places(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Flat indices of the True elements, in row-major order, without asking the device how many.

    Args:
        mask: of any shape.
        count: how many there are.
    """
    if not count:  # on a GPU, torch before 2.10 fails on a mask without elements
        return torch.empty(0, dtype=torch.long, device=mask.device)
    return torch.nonzero_static(mask.reshape(-1), size=count).squeeze(1)


def pack_bits(bits_RW: torch.Tensor) -> torch.Tensor:
    """Eight booleans to a byte, [R, ceil(W / 8)]."""
    rows, width = bits_RW.shape
    padded = bits_RW.new_zeros(rows, -(-width // 8), 8, dtype=torch.uint8)
    padded.flatten(1)[:, :width] = bits_RW
    return (padded << _shifts(bits_RW)).sum(-1, dtype=torch.uint8)


def unpack_bits(bytes_RB: torch.Tensor, width: int) -> torch.Tensor:
    """Booleans [R, width] of `pack_bits`."""
    bits = (bytes_RB.unsqueeze(-1) >> _shifts(bytes_RB)) & 1
    return bits.flatten(1)[:, :width].bool()


def _shifts(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
