"""A virtual stage: the sum of its pieces, and the highest point of its backward.

Sources, megatron/core of 0.19.2: recompute.py (`checkpointed_forward`),
pipeline_parallel/fine_grained_activation_offload.py (`ChunkOffloadHandler.should_bulk_offload`),
fp8_utils.py (`get_fp8_context`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from piper_megatron.layout.job import Job
from piper_megatron.layout.pipeline import Chunk
from piper_megatron.layout.sizes import Number
from piper_megatron.resources.activations.ends import (
    embedding_activations,
    head_activations,
    mtp_activations,
)
from piper_megatron.resources.activations.layer import (
    Activations,
    layer_activations,
    layers_activations,
)
from piper_megatron.workload.spec import TrainingSpec


@dataclass(frozen=True)
class ChunkActivations:
    """Bytes of one micro-batch on one rank of a virtual stage.

    Attributes:
        pieces: in the order of the forward pass: `embedding`, `layers ...`, `mtp`, `head`.
    """

    pieces: tuple[tuple[str, Activations], ...]

    @property
    def saved(self) -> Mapping[str, Number]:
        """Kept from forward to backward, by part."""
        parts: dict[str, Number] = {}
        for _, piece in self.pieces:
            for part, bytes in piece.saved.items():
                parts[part] = parts.get(part, 0) + bytes
        return parts

    @property
    def total(self) -> Number:
        """Kept from forward to backward."""
        return sum((piece.total for _, piece in self.pieces), start=0)

    def beyond(self) -> dict[str, tuple[Number, Activations]]:
        """How far memory rises above `total`, by the piece that runs backward.

        What pieces behind it kept is gone by then, so the figure may be negative. Of several pieces
        of one name the highest counts. `forward` is the highest point of the forward pass.
        """
        peaks: dict[str, tuple[Number, Activations]] = {}
        behind: Number = 0
        for name, piece in reversed(self.pieces):
            kind = name.split()[0]
            self._raise(peaks, kind, piece.working - behind, piece)
            behind = behind + piece.total
            self._raise(peaks, "forward", piece.working_forward - (behind - piece.total), piece)
        return peaks

    @staticmethod
    def _raise(
        peaks: dict[str, tuple[Number, Activations]], name: str, height: Number, piece: Activations
    ) -> None:
        if name not in peaks or height > peaks[name][0]:
            peaks[name] = (height, piece)


def chunk_activations(
    job: Job,
    chunk: Chunk,
    *,
    imbalance: float = 1.0,
    cpu: bool = False,
    known: "dict[_LayerSettings, Activations] | None" = None,
) -> ChunkActivations:
    """What a virtual stage keeps and needs for each micro-batch.

    Args:
        job: the whole job.
        chunk: one of its virtual stages.
        imbalance: rows on the most loaded expert rank over the mean.
        cpu: operators are torch's for the CPU.
        known: layers of the same job that were measured before; new ones are added.
    """
    model, training, sizes = job.model, job.training, job.sizes
    pieces: list[tuple[str, Activations]] = []
    if chunk.embedding:
        pieces.append(("embedding", embedding_activations(model, training, sizes, cpu=cpu)))
    pieces += _layers(job, chunk, imbalance, cpu, {} if known is None else known)
    for _ in range(chunk.mtp_layers):
        moe = model.mtp_moe if chunk.layers else model.experts is not None
        mtp = mtp_activations(model, training, sizes, imbalance=imbalance, moe=moe, cpu=cpu)
        pieces.append(("mtp", mtp))
    if chunk.loss:
        # with multi-token prediction, the last norm is where the last decoder layer is
        norm_here = not model.mtp_layers or model.layers - 1 in chunk.layers
        head = head_activations(model, training, sizes, final_norm=norm_here, cpu=cpu)
        pieces.append(("head", head))
    return ChunkActivations(tuple(pieces))


def _layers(
    job: Job,
    chunk: Chunk,
    imbalance: float,
    cpu: bool,
    known: "dict[_LayerSettings, Activations]",
) -> list[tuple[str, Activations]]:
    """Decoder layers one by one, or in the groups that full recomputation makes of them."""
    given = job.model, job.training, job.sizes
    if _recomputes_groups(job.training):
        size = job.training.recompute_num_layers or 1
        groups = [chunk.layers[at : at + size] for at in range(0, len(chunk.layers), size)]
        kinds = [[job.model.moe_layers[layer] for layer in group] for group in groups]
        return [
            (
                f"layers {group[0]}-{group[-1]}",
                layers_activations(*given, moe=kind, imbalance=imbalance, cpu=cpu),
            )
            for group, kind in zip(groups, kinds, strict=True)
        ]
    pieces = []
    for place, layer in enumerate(chunk.layers):
        settings = _layer_settings(job, chunk, place)
        if settings not in known:
            known[settings] = layer_activations(
                *given, **asdict(settings), imbalance=imbalance, cpu=cpu
            )
        piece = known[settings]
        if place < job.training.cpu_offloading_num_layers:
            piece = _on_the_host(piece)
        pieces.append((f"layers {layer}", piece))
    return pieces


@dataclass(frozen=True, kw_only=True)
class _LayerSettings:
    """By what the layers of one model differ; see `layer_activations`."""

    moe: bool
    checkpointed: bool
    offloading: bool
    low_precision: bool


def _layer_settings(job: Job, chunk: Chunk, place: int) -> _LayerSettings:
    model, training = job.model, job.training
    layer = chunk.layers[place]
    last = model.layers - 1
    among_first = training.recompute_method == "uniform" or place < (
        training.recompute_num_layers or 0
    )
    return _LayerSettings(
        moe=model.moe_layers[layer],
        checkpointed=training.recompute_granularity == "full" and among_first,
        # what backward needs at once stays on the device
        offloading=not (layer == last and not model.mtp_layers and _turns_around(job, chunk)),
        low_precision=not (training.first_last_layers_bf16 and layer in (0, last)),
    )


def _recomputes_groups(training: TrainingSpec) -> bool:
    return (
        training.recompute_granularity == "full"
        and training.recompute_method == "uniform"
        and (training.recompute_num_layers or 1) > 1
    )


def _turns_around(job: Job, chunk: Chunk) -> bool:
    """Whether forward becomes backward on the rank that holds the chunk."""
    return any(
        chunk in stage and any(other.loss for other in stage) for stage in job.pipeline.stages
    )


def _on_the_host(piece: Activations) -> Activations:
    """A layer whose activations wait on the host (`--cpu-offloading-num-layers`)."""
    return replace(piece, saved={}, offloaded=piece.saved, working=piece.working + piece.total)
