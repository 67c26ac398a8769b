"""Which layers a pipeline stage holds, in numbers: for many layouts at once.

The layers are split as Megatron splits them by default where PP x VPP divides them. Elsewhere they
are taken as balanced: the loss and every layer of multi-token prediction count as a layer, and the
chunks before the last get what is left over. A layout text of that kind differs by one layer at
most (`layout.pipeline.balanced_layout_string`). Whoever knows how long the pieces take can say how
many layers loss and prediction are worth instead.
"""

from dataclasses import dataclass

import numpy as np

from piper_megatron.layout.sizes import Number, Sizes
from piper_megatron.workload.spec import ModelSpec


@dataclass(frozen=True)
class LayerKind:
    """What tells the layers of a model apart.

    Attributes:
        moe: has experts.
        windowed: attention sees a window.
    """

    moe: bool
    windowed: bool


@dataclass(frozen=True)
class StageLayers:
    """What one stage of each layout holds.

    Attributes:
        layers: number of decoder layers of each kind.
        embedding, last: 1 where the stage has the embedding, or output layer and loss, else 0.
    """

    layers: dict[LayerKind, Number]
    embedding: Number
    last: Number

    @property
    def count(self) -> Number:
        """Decoder layers."""
        return sum(self.layers.values(), start=0)

    def with_experts(self, moe: bool) -> Number:
        """Decoder layers with or without experts."""
        return sum((n for kind, n in self.layers.items() if kind.moe == moe), start=0)


def layer_kinds(model: ModelSpec) -> list[LayerKind]:
    """Kind of every decoder layer."""
    windowed = model.attention.windowed or (False,) * model.layers
    return [LayerKind(*kind) for kind in zip(model.moe_layers, windowed, strict=True)]


def mtp_kind(model: ModelSpec) -> LayerKind:
    """Kind of the layers of multi-token prediction."""
    return LayerKind(model.mtp_moe, layer_kinds(model)[-1].windowed)


def stage_layers(
    model: ModelSpec, sizes: Sizes, stage: Number, beside: np.ndarray | None = None
) -> StageLayers:
    """What a stage holds.

    Args:
        model: what is trained.
        sizes: of many layouts.
        stage: pipeline rank, one for each layout.
        beside: decoder layers that loss and prediction are worth; 0 stands for Megatron's split
            where that comes out, None for this and elsewhere for one layer each.
    """
    kinds = layer_kinds(model)
    bounds = []
    for place in range(int(np.max(sizes.vpp))):
        chunk = stage + place * np.asarray(sizes.pp)
        begin, end = (_layers_before(model, sizes, chunk + i, beside) for i in (0, 1))
        bounds.append((begin, np.where(place < np.asarray(sizes.vpp), end, begin)))
    layers: dict[LayerKind, Number] = {}
    for kind in sorted(set(kinds), key=lambda kind: (kind.moe, kind.windowed)):
        before = np.concatenate([[0], np.cumsum([each == kind for each in kinds])])
        layers[kind] = sum(before[end] - before[begin] for begin, end in bounds)
    return StageLayers(
        layers,
        embedding=np.where(np.equal(stage, 0), 1, 0),
        last=np.where(np.equal(stage, sizes.pp - 1), 1, 0),
    )


def beside_by_time(model: ModelSpec, sizes: Sizes, worth: Number) -> np.ndarray:
    """The `beside` of `stage_layers` under which the slowest stage is quickest.

    Args:
        model: what is trained.
        sizes: of many layouts.
        worth: time of loss and prediction over that of a layer, one for each layout.
    """
    pp, vpp = np.asarray(sizes.pp), np.asarray(sizes.vpp)
    even = model.layers % (pp * vpp) == 0
    options = [np.where(even, 0, 1 + model.mtp_layers)]
    options += [np.floor(worth).astype(int), np.ceil(worth).astype(int)]
    slowest = []
    for beside in options:
        chunks, each, more = _balanced(model, sizes, beside)
        last = _last_layers(model, chunks, beside)
        ends = (vpp - 1) * each + more // pp + last + worth
        shared = np.maximum(vpp * each + -(-more // pp), ends)
        slowest.append(np.where(even & (beside == 0), model.layers // pp + worth, shared))
    return np.choose(np.argmin(slowest, axis=0), options)


def leading_stages(
    model: ModelSpec, sizes: Sizes, beside: np.ndarray | None = None
) -> list[Number]:
    """Stages of which one is the fullest and one the slowest.

    The first keeps most micro-batches, the last has the head. Of the others, which are alike, the
    second; and the first one that has experts in every layer and as many layers as any.
    """
    last = np.asarray(sizes.pp) - 1
    chunks, each, more = _balanced(model, sizes, beside)
    alike = _even(model, chunks, beside) | (more == 0)
    larger = np.where(alike, 0, (chunks - 1 - more) % sizes.pp)
    dense = next((i for i, moe in enumerate(model.moe_layers) if moe), 0)
    full = np.maximum(larger, -(-dense // np.maximum(each, 1)))
    return [np.zeros_like(last), np.minimum(1, last), np.clip(full, 0, last), last]


def _even(model: ModelSpec, chunks: np.ndarray, beside: np.ndarray | None) -> np.ndarray:
    """Where Megatron's own split is taken."""
    divides = model.layers % chunks == 0
    return divides if beside is None else divides & (beside == 0)


def _balanced(
    model: ModelSpec, sizes: Sizes, beside: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Chunks, layers of each but the last, and how many of these have one more."""
    chunks = np.asarray(sizes.pp) * sizes.vpp
    others = np.maximum(chunks - 1, 1)
    layers = model.layers - _last_layers(model, chunks, beside)
    return chunks, layers // others, layers % others


def _last_layers(model: ModelSpec, chunks: np.ndarray, beside: np.ndarray | None) -> np.ndarray:
    """Decoder layers of the last chunk in a balanced split."""
    worth = 1 + model.mtp_layers if beside is None else beside
    each, more = (model.layers + worth) // chunks, (model.layers + worth) % chunks
    # the embedding's chunk is the last one to get one more, the loss's the last but one
    shared = np.maximum(each + (more == chunks - 1) - worth, 0)
    return np.where(chunks > 1, shared, model.layers)


def _layers_before(
    model: ModelSpec, sizes: Sizes, chunk: Number, beside: np.ndarray | None
) -> np.ndarray:
    """Decoder layers in front of a chunk of the model; of the one behind the last, all."""
    chunks, each, more = _balanced(model, sizes, beside)
    even = chunk * (model.layers // chunks)
    balanced = chunk * each + np.maximum(chunk - (chunks - 1 - more), 0)
    before = np.where(_even(model, chunks, beside), even, balanced)
    return np.where(chunk >= chunks, model.layers, np.minimum(before, model.layers))
