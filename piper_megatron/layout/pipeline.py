"""The pipeline layout: what every virtual stage of every pipeline rank holds."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One virtual stage (model chunk) of a pipeline rank.

    Attributes:
        layers: decoder layers, numbered from 0 over the whole model.
        embedding: holds the input embedding.
        mtp_layers: multi-token-prediction layers that it holds.
        loss: holds the output layer and the loss.
    """

    layers: tuple[int, ...]
    embedding: bool = False
    mtp_layers: int = 0
    loss: bool = False


@dataclass(frozen=True)
class PipelineLayout:
    """Chunks of every pipeline rank.

    Attributes:
        stages: [PP][VPP] chunks; chunk v of rank p is the (v * PP + p)-th of the model.
    """

    stages: tuple[tuple[Chunk, ...], ...]

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.stages)

    @property
    def vpp(self) -> int:
        """Chunks of a pipeline rank."""
        return len(self.stages[0])
