"""Decoder layers shared out over pipeline chunks so that the slowest is as quick as can be."""

from collections.abc import Sequence

from piper_megatron.layout.job import Job
from piper_megatron.layout.pipeline import layout_string
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.closed_time import PieceTime, piece_times
from piper_megatron.resources.layer_time import Machine
from piper_megatron.resources.stage_layers import layer_kinds


def balanced_by_time(
    job: Job, platform: Platform, stack: str | None = None, imbalance: float = 1.0
) -> str | None:
    """A layout text in which chunks take equally long, ends of the model included.

    Args:
        job: its layers are shared out anew over its PP x VPP chunks.
        platform: whose kernels hold.
        stack: as for an estimate.
        imbalance: as for an estimate.

    Returns:
        None with one stage, or where the layers are too few.
    """
    chunks = job.layout.pp * job.pipeline.vpp
    if job.layout.pp == 1:
        return None
    machine = Machine(platform=platform, stack=platform.need_accelerator().stack(stack))
    times = piece_times(job.model, job.training, job.sizes, machine, imbalance)
    layers = [_seconds(times.layers[kind]) for kind in layer_kinds(job.model)]
    counts = shared_out(layers, chunks, _seconds(times.first), _seconds(times.last))
    return None if counts is None else layout_string(counts, job.model.mtp_layers)


def _seconds(time: PieceTime) -> float:
    return float(time.forward_s + time.backward_s)


def shared_out(layers: Sequence[float], chunks: int, first: float, last: float) -> list[int] | None:
    """Numbers of consecutive layers in each chunk with the smallest largest sum.

    Of equal ones the chunks at the front hold the least: they keep the most micro-batches.

    Args:
        layers: cost of each.
        chunks: at least 2; those in the middle hold a layer at least.
        first: cost of what the first chunk holds beside.
        last: the same of the last chunk.

    Returns:
        None where the layers are too few.
    """
    if len(layers) < chunks - 2:
        return None
    # the answer is a sum of consecutive layers at some end or in the middle
    caps = sorted(
        {
            beside + sum(layers[begin:end])
            for begin in range(len(layers) + 1)
            for end in range(begin, len(layers) + 1)
            for beside in (0.0, *([first] if begin == 0 else []), *([last] if end else []))
        }
    )
    low, high = 0, len(caps) - 1
    while low < high:
        middle = (low + high) // 2
        if _filled(layers, chunks, first, last, caps[middle]) is None:
            low = middle + 1
        else:
            high = middle
    return _filled(layers, chunks, first, last, caps[low])


def _filled(
    layers: Sequence[float], chunks: int, first: float, last: float, cap: float
) -> list[int] | None:
    """Fills chunks from the last one on, each up to the cap; None when that does not work out."""
    slack = cap * (1 + 1e-12)
    counts = [0] * chunks
    left = len(layers)
    for chunk in range(chunks - 1, 0, -1):
        spent = last if chunk == chunks - 1 else 0.0
        keep = chunk - 1  # a layer for each chunk between this one and the first
        while left > keep and spent + layers[left - 1] <= slack:
            left -= 1
            spent += layers[left]
            counts[chunk] += 1
        if spent > slack or (chunk < chunks - 1 and not counts[chunk]):
            return None
    counts[0] = left
    return counts if first + sum(layers[:left]) <= slack else None
