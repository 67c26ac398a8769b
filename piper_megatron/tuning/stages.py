"""The pieces of a model shared out over pipeline chunks by the time that they take.

A pipeline is as quick as its slowest rank, and waits for its slowest chunk. Where ranks have
several chunks, the one and the other can want different layouts.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from piper_megatron.layout.job import Job
from piper_megatron.layout.pipeline import layout_text
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.closed_time import PieceTime, piece_times
from piper_megatron.resources.layer_time import Machine
from piper_megatron.resources.stage_layers import layer_kinds


def balanced_by_time(
    job: Job, platform: Platform, stack: str | None = None, imbalance: float = 1.0
) -> list[str]:
    """Layout texts in which chunks or ranks take equally long.

    Embedding, multi-token prediction and loss are pieces like the layers between them, and may
    have a chunk of their own.

    Args:
        job: its pieces are shared out anew over its PP x VPP chunks.
        platform: whose kernels hold.
        stack: as for an estimate.
        imbalance: as for an estimate.

    Returns:
        None of them with one stage, or where the pieces are too few.
    """
    pp, vpp, mtp = job.layout.pp, job.pipeline.vpp, job.model.mtp_layers
    if pp == 1:
        return []
    machine = Machine(platform=platform, stack=platform.need_accelerator().stack(stack))
    times = piece_times(job.model, job.training, job.sizes, machine, imbalance)
    letters = ["E", *"t" * job.model.layers, *(["m" * mtp] if mtp else []), "L"]
    costs = [
        _seconds(times.first),
        *(_seconds(times.layers[kind]) for kind in layer_kinds(job.model)),
        *([_seconds(times.mtp)] if mtp else []),
        _seconds(times.last) - _seconds(times.mtp),
    ]
    # prediction must not be on the first rank, so that it stays with the loss where there are two
    if mtp and pp == 2:
        letters[-2:] = ["".join(letters[-2:])]
        costs[-2:] = [sum(costs[-2:])]
    texts = []
    ends = len(costs) - 1 - job.model.layers
    for counts in (by_chunk(costs, pp * vpp), by_rank(costs, pp, vpp, ends)):
        if counts is not None:
            borders = pairwise(accumulate(counts, initial=0))
            texts.append(layout_text(["".join(letters[a:b]) for a, b in borders]))
    return list(dict.fromkeys(texts))


def _seconds(time: PieceTime) -> float:
    return float(time.forward_s + time.backward_s)


def by_chunk(costs: Sequence[float], chunks: int) -> list[int] | None:
    """Numbers of consecutive pieces in each chunk with the smallest largest sum.

    Of equal ones the chunks at the front hold the least: they keep the most micro-batches.

    Args:
        costs: of each piece.
        chunks: each holds a piece at least.

    Returns:
        None where the pieces are too few.
    """
    if len(costs) < chunks:
        return None
    before = np.concatenate([[0.0], np.cumsum(costs)])
    caps = np.unique(np.subtract.outer(before, before))
    caps = caps[caps >= max(costs) * (1 - 1e-12)]
    low, high = 0, len(caps) - 1
    while low < high:
        middle = (low + high) // 2
        if _filled(costs, chunks, caps[middle])[0] > caps[middle] * (1 + 1e-9):
            low = middle + 1
        else:
            high = middle
    return _filled(costs, chunks, caps[low])[1]


def _filled(costs: Sequence[float], chunks: int, cap: float) -> tuple[float, list[int]]:
    """Fills chunks from the last one on, each up to the cap; what the first one takes then."""
    counts, left = [0] * chunks, len(costs)
    for chunk in range(chunks - 1, 0, -1):
        spent = 0.0
        # a piece stays for each chunk in front
        while left > chunk and spent + costs[left - 1] <= cap * (1 + 1e-9):
            left -= 1
            spent += costs[left]
            counts[chunk] += 1
    counts[0] = left
    return sum(costs[:left]), counts


def by_rank(costs: Sequence[float], pp: int, vpp: int, ends: int = 1) -> list[int] | None:
    """Numbers of consecutive pieces in each chunk with ranks that take about equally long.

    Layers go one by one to the rank that has the least, and there to the chunk that has the least.

    Args:
        costs: of each piece; the first is the embedding's.
        pp: ranks.
        vpp: chunks of each.
        ends: last pieces, which stay in the last chunk.

    Returns:
        None where the pieces are too few.
    """
    chunks, layers = pp * vpp, len(costs) - 1 - ends
    if layers < chunks - 2:
        return None
    each = sum(costs[1:-ends]) / layers
    counts = [0, *[1] * (chunks - 2), 0]
    loads = [costs[0], *[each] * (chunks - 2), sum(costs[-ends:])]
    for _ in range(layers - (chunks - 2)):
        # the front keeps the most micro-batches, so that the back is filled first
        chunk = min(range(chunks), key=lambda c: (sum(loads[c % pp :: pp]), loads[c], -c))
        counts[chunk] += 1
        loads[chunk] += each
    counts[0] += 1
    counts[-1] += ends
    return counts
