"""A virtual stage: the sum of its pieces, and the highest point of its backward.

Sources, megatron/core of 0.19.2: recompute.py (`checkpointed_forward`),
pipeline_parallel/fine_grained_activation_offload.py (`ChunkOffloadHandler.should_bulk_offload`),
fp8_utils.py (`get_fp8_context`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    job: Job, chunk: Chunk, *, imbalance: float = 1.0, cpu: bool = False
) -> ChunkActivations:
    """What a virtual stage keeps and needs for each micro-batch.

    Args:
        job: the whole job.
        chunk: one of its virtual stages.
        imbalance: rows on the most loaded expert rank over the mean.
        cpu: operators are torch's for the CPU.
    """
    model, training, sizes = job.model, job.training, job.sizes
    pieces: list[tuple[str, Activations]] = []
    if chunk.embedding:
        pieces.append(("embedding", embedding_activations(model, training, sizes, cpu=cpu)))
    pieces += _layers(job, chunk, imbalance, cpu)
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


def _layers(job: Job, chunk: Chunk, imbalance: float, cpu: bool) -> list[tuple[str, Activations]]:
    """Decoder layers one by one, or in the groups that full recomputation makes of them."""
    model, training, sizes = job.model, job.training, job.sizes
    full = training.recompute_granularity == "full"
    size = training.recompute_num_layers or 1
    if full and training.recompute_method == "uniform" and size > 1:
        groups = [chunk.layers[at : at + size] for at in range(0, len(chunk.layers), size)]
        return [
            (
                f"layers {group[0]}-{group[-1]}",
                layers_activations(
                    model,
                    training,
                    sizes,
                    moe=[model.moe_layers[layer] for layer in group],
                    imbalance=imbalance,
                    cpu=cpu,
                ),
            )
            for group in groups
        ]
    known: dict[tuple[bool, ...], Activations] = {}
    pieces = []
    for place, layer in enumerate(chunk.layers):
        checkpointed = full and (
            training.recompute_method == "uniform" or place < (training.recompute_num_layers or 0)
        )
        stays = chunk.loss and layer == chunk.layers[-1]
        kind = (
            model.moe_layers[layer],
            checkpointed,
            not stays,
            not (training.first_last_layers_bf16 and layer in (0, model.layers - 1)),
        )
        if kind not in known:
            moe, _, offloading, low_precision = kind
            known[kind] = layer_activations(
                model,
                training,
                sizes,
                moe=moe,
                imbalance=imbalance,
                cpu=cpu,
                checkpointed=checkpointed,
                offloading=offloading,
                low_precision=low_precision,
            )
        piece = known[kind]
        if place < training.cpu_offloading_num_layers:
            piece = _on_the_host(piece)
        pieces.append((f"layers {layer}", piece))
    return pieces


def _on_the_host(piece: Activations) -> Activations:
    """A layer whose activations wait on the host (`--cpu-offloading-num-layers`)."""
    return replace(piece, saved={}, offloaded=piece.saved, working=piece.working + piece.total)
