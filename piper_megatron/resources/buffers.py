"""The contiguous buffers in which Megatron's DDP keeps parameters and gradients.

Parameters of one kind share a buffer, last registered first. The distributed optimizer pads every
parameter's start and every bucket's end, and gives each data-parallel rank an equal share of every
bucket.

Sources, megatron/core of 0.19.2: optimizer/param_layout.py, optimizer/distrib_optimizer.py and
optimizer/layer_wise_optimizer.py (_compute_per_buffer_param_layout),
distributed/param_and_grad_buffer.py (group_params_for_buffers).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from piper_megatron.layout.job import Job
from piper_megatron.resources.parameters import Tensor, separate_experts
from piper_megatron.resources.state_costs import (
    has_quantized_weights,
    in_low_precision,
    is_emerging,
    is_sharded,
)

_START = 64  # a parameter starts at a multiple of it
_BUCKET_END = 128
_BUSBW_END = 2**16  # --ddp-pad-buckets-for-high-nccl-busbw
_CHUNK_FILL = 0.9  # PADDING_FLOOR of the layer-wise optimizer


@dataclass(frozen=True)
class BufferKind:
    """What parameters in one buffer have in common.

    Attributes:
        expert: reduced over the expert data-parallel group.
        quantized: weights in 8 bits.
        matrices: weights that Muon updates, each as a whole on one rank.
    """

    expert: bool
    quantized: bool
    matrices: bool


@dataclass(frozen=True)
class Buffer:
    """One buffer of one virtual stage.

    Attributes:
        kind: of its parameters.
        parameters: elements of parameters.
        elements: with padding.
        owned: int array [shards], elements of parameters that each share of it holds.
    """

    kind: BufferKind
    parameters: int
    elements: int
    owned: np.ndarray


def shards(job: Job, expert: bool) -> int:
    """Ranks among which a buffer is shared out."""
    group = job.layout.edp if expert else job.layout.dp * job.layout.cp
    return group // job.training.num_distributed_optimizer_instances


def stage_buffers(job: Job, stage: int, chunks: Sequence[Sequence[Tensor]]) -> list[Buffer]:
    """Buffers of all virtual stages of a pipeline rank.

    Args:
        job: what is trained and how.
        stage: pipeline rank.
        chunks: parameters of each of its virtual stages, as `chunk_tensors` gives them.
    """
    apart = bool(separate_experts(job.sizes))
    quantizes = has_quantized_weights(job.training)
    emerging = is_emerging(job.training)
    bucket = _bucket_size(job, sum(int(tensor.elements) for chunk in chunks for tensor in chunk))
    found = []
    for place, chunk in enumerate(chunks):
        groups: dict[BufferKind, list[Tensor]] = {}
        for tensor in chunk:
            low = quantizes and in_low_precision(tensor, job.training, job.model.layers)
            matrix = emerging and tensor.kind in ("linear", "matrix")
            kind = BufferKind(tensor.expert and apart, low, matrix)
            groups.setdefault(kind, []).append(tensor)
        has_buckets = not stage and not place
        found += [
            _buffer(job, kind, members, bucket if has_buckets else None)
            for kind, members in groups.items()
        ]
    return found


def _bucket_size(job: Job, parameters: int) -> int | None:
    """Elements after which a bucket is closed; None for one bucket.

    megatron/training/training.py:resolve_ddp_bucket_size (0.19.2). Only the first chunk of the
    first stage has several buckets.
    """
    training = job.training
    if not training.overlap_grad_reduce:
        return None
    if training.ddp_num_buckets:
        return parameters // training.ddp_num_buckets
    return training.ddp_bucket_size or max(40_000_000, 1_000_000 * job.layout.dp * job.layout.cp)


def _buffer(job: Job, kind: BufferKind, tensors: list[Tensor], bucket: int | None) -> Buffer:
    parameters = sum(int(tensor.elements) for tensor in tensors)
    if not is_sharded(job.training):
        return Buffer(kind, parameters, parameters, np.array([parameters]))
    count = shards(job, kind.expert)
    end = math.lcm(count, _BUCKET_END)
    if job.training.ddp_pad_buckets_for_high_nccl_busbw:
        end = math.lcm(end, _BUSBW_END)
    if kind.matrices:
        elements, owned = whole_layout(tensors[::-1], bucket, count, end)
    else:
        elements, owned = split_layout(tensors[::-1], bucket, count, end)
    assert owned.sum() == parameters
    return Buffer(kind, parameters, elements, owned)


def _padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def split_layout(
    tensors: Sequence[Tensor], bucket: int | None, count: int, end: int
) -> tuple[int, np.ndarray]:
    """The distributed optimizer's layout of one buffer.

    Args:
        tensors: its parameters, last registered first.
        bucket: elements after which a bucket is closed, or None.
        count: shares.
        end: a bucket ends at a multiple of it.

    Returns:
        Elements with padding, and int array [count]: elements of parameters in each share.
    """
    owned = np.zeros(count, dtype=np.int64)
    begin = position = 0
    inside: list[tuple[int, int]] = []

    def close(bucket_end: int) -> int:
        padded = _padded(bucket_end, end)
        owned[:] += _elements_in_shares(inside, begin, padded, count)
        inside.clear()
        return padded

    for tensor in tensors:
        position = _padded(position, _START)
        if tensor.shared and inside:
            begin = position = close(position)
        stop = position + int(tensor.elements)
        inside.append((position, stop))
        position = stop
        if tensor.shared or (bucket is not None and stop - begin >= bucket):
            begin = position = close(stop)
    if inside:
        position = close(position)
    return position, owned


def _elements_in_shares(
    inside: list[tuple[int, int]], begin: int, end: int, count: int
) -> np.ndarray:
    """How many elements of a bucket's parameters lie in each of its equal shares."""
    edges = np.linspace(begin, end, count + 1, dtype=np.int64)
    places = np.array(inside, dtype=np.int64)
    lengths = places[:, 1] - places[:, 0]
    before = np.concatenate([[0], np.cumsum(lengths)])
    place = np.searchsorted(places[:, 0], edges, side="right")
    within = np.minimum(edges - places[place - 1, 0], lengths[place - 1])
    return np.diff(np.where(place > 0, before[place - 1] + within, 0))


def whole_layout(
    tensors: Sequence[Tensor], bucket: int | None, count: int, end: int
) -> tuple[int, np.ndarray]:
    """The layer-wise optimizer's layout, arguments and result as of `split_layout`.

    A share holds whole parameters; the largest of a bucket are shared out first.
    """
    owned = np.zeros(count, dtype=np.int64)
    elements = 0
    waiting: list[int] = []

    def close() -> int:
        used = np.zeros(count, dtype=np.int64)
        for numel in sorted(waiting, reverse=True):
            share = int(used.argmin())
            used[share] = _padded(int(used[share]), _START) + numel
            owned[share] += numel
        waiting.clear()
        return count * _padded(int(used.max()), math.lcm(_START, end // count))

    for tensor in tensors:
        waiting.append(int(tensor.elements))
        least = bucket and max(bucket, int(count * max(waiting) * _CHUNK_FILL))
        if least is not None and sum(waiting) >= least:
            elements += close()
    return elements + (close() if waiting else 0), owned
