"""How long a chunk of the model takes, for one micro-batch on one pipeline rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from piper_megatron.layout.job import Job
from piper_megatron.layout.pipeline import Chunk
from piper_megatron.layout.sizes import Sizes
from piper_megatron.resources.communication import (
    Exchange,
    embedding_communication,
    head_communication,
)
from piper_megatron.resources.compute import (
    embedding_compute,
    head_compute,
    prediction_compute,
)
from piper_megatron.resources.kernels import Work
from piper_megatron.resources.layer_time import (
    LayerTime,
    Machine,
    Seconds,
    add,
    compose,
    layer_time,
    together_s,
    total,
)
from piper_megatron.workload.spec import ModelSpec, TrainingSpec


@dataclass(frozen=True)
class ChunkTime:
    """Seconds of a chunk.

    Attributes:
        layers: its transformer layers in order, those of multi-token prediction last.
        ends: embedding, projections of multi-token prediction, output layers with their losses.
    """

    layers: tuple[LayerTime, ...]
    ends: tuple[LayerTime, ...]

    @cached_property
    def forward(self) -> Seconds:
        """Of the forward pass, by part."""
        return add(*(each.forward for each in (*self.layers, *self.ends)))

    @cached_property
    def backward(self) -> Seconds:
        """Of the backward pass, by part."""
        return add(*(each.backward for each in (*self.layers, *self.ends)))

    @property
    def last_weight_s(self) -> float:
        """Of its backward pass, products for weights that may run when its result has left."""
        sides = self.layers[0].backward_sides if self.layers else None
        return float(sides.before_weight_s) if sides else 0.0

    def beside_s(self, other: "ChunkTime", training: TrainingSpec) -> float:
        """Of its forward pass beside the backward pass of another chunk.

        Layers run in pairs, the first forward beside the last backward; what is left over, and the
        ends, run alone (`TransformerModelChunkSchedulePlan.run`).
        """
        backwards = other.layers[::-1]
        paired = min(len(self.layers), len(backwards))
        alone = [layer.forward for layer in (*self.layers[paired:], *self.ends)]
        alone += [layer.backward for layer in (*backwards[paired:], *other.ends)]
        pairs = zip(self.layers, backwards, strict=False)
        return sum(float(total(parts)) for parts in alone) + sum(
            float(together_s(*pair, training)) for pair in pairs
        )


class ChunkClock:
    """Times chunks of one job; layers alike are timed once."""

    def __init__(self, job: Job, machine: Machine, imbalance: float) -> None:
        self.job, self.machine, self.imbalance = job, machine, imbalance
        self._layers: dict[tuple[bool, bool, bool, bool], LayerTime] = {}
        self._ends: dict[str, LayerTime] = {}
        self._chunks: dict[tuple, ChunkTime] = {}

    def chunk(self, chunk: Chunk) -> ChunkTime:
        """Time of a chunk."""
        keys = tuple(self._layer_keys(chunk))
        ends = tuple(self._end_names(chunk))
        if (keys, ends) not in self._chunks:
            self._chunks[keys, ends] = ChunkTime(
                tuple(self._layer(*key) for key in keys), tuple(self._end(name) for name in ends)
            )
        return self._chunks[keys, ends]

    def _layer_keys(self, chunk: Chunk) -> Iterator[tuple[bool, bool, bool, bool]]:
        """For each layer: has experts, is windowed, is in 16 bits, is spared recomputation."""
        model, training = self.job.model, self.job.training
        spared_from = len(chunk.layers)
        if training.recompute_granularity == "full" and training.recompute_method == "block":
            # transformer_block.py: _checkpointed_forward
            spared_from = training.recompute_num_layers or 0
        for place, layer in enumerate(chunk.layers):
            windowed = bool(model.attention.windowed) and model.attention.windowed[layer]
            exact = training.first_last_layers_bf16 and layer in (0, model.layers - 1)
            yield model.moe_layers[layer], windowed, exact, place >= spared_from
        for _ in range(chunk.mtp_layers):
            # a stage without decoder layers has none to copy (megatron/training/models/gpt.py:404)
            moe = model.mtp_moe if chunk.layers else model.experts is not None
            windowed = bool(model.attention.windowed) and model.attention.windowed[-1]
            yield moe, windowed, False, False

    def _layer(self, moe: bool, windowed: bool, exact: bool, spared: bool) -> LayerTime:
        key = (moe, windowed, exact, spared)
        if key not in self._layers:
            self._layers[key] = layer_time(
                self.job.model,
                varied(self.job.training, exact=exact, spared=spared),
                self.job.sizes,
                self.machine,
                moe=moe,
                windowed=windowed,
                imbalance=self.imbalance,
            )
        return self._layers[key]

    def _end_names(self, chunk: Chunk) -> Iterator[str]:
        yield from ["embedding"] * chunk.embedding
        # every depth embeds the tokens again, shifted
        yield from ["embedding", "prediction"] * chunk.mtp_layers
        if chunk.loss:
            yield from ["head"] * (1 + self.job.model.mtp_layers)

    def _end(self, name: str) -> LayerTime:
        if name not in self._ends:
            job = self.job
            self._ends[name] = end_time(name, job.model, job.training, job.sizes, self.machine)
        return self._ends[name]


def end_time(
    name: str, model: ModelSpec, training: TrainingSpec, sizes: Sizes, machine: Machine
) -> LayerTime:
    """Time of what is not a transformer layer, for one micro-batch.

    Args:
        name: `embedding`; `prediction`, what a layer of multi-token prediction has before its
            transformer layer; or `head`, an output layer with its loss.
        model: what is trained.
        training: kernels, overlap.
        sizes: one layout, or arrays of them.
        machine: whose curves hold.
    """
    given = model, training, sizes
    work: dict[str, Work]
    exchanges: dict[str, Exchange] = {}
    if name == "embedding":
        work = {name: embedding_compute(*given, machine.accelerator)}
        exchanges[name] = embedding_communication(*given, machine.platform, order=machine.order)
    elif name == "prediction":
        work = {name: prediction_compute(*given, machine.accelerator)}
    else:
        work = head_compute(*given, machine.accelerator)
        exchanges[name] = head_communication(*given, machine.platform, order=machine.order)
    return compose(work, exchanges, machine)


def varied(training: TrainingSpec, *, exact: bool, spared: bool) -> TrainingSpec:
    """The settings that hold for a single layer.

    Args:
        training: of the job.
        exact: `--first-last-layers-bf16` keeps the layer in 16 bits.
        spared: full recomputation leaves the layer out.
    """
    changes: dict[str, object] = {"fp8": None, "fp4": False} if exact else {}
    if spared:
        changes["recompute_granularity"] = None
    return training.model_copy(update=changes) if changes else training
