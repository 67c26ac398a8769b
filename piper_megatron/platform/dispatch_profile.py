"""Measured times of the token dispatchers on a machine, which decide over the model's prices.

Times of one dispatch and one combine, forward, on an expert group of one shape with one kind of
routing, for several sizes of the hidden states. An exchange of equal parts between all ranks is
the routing of as many experts as ranks with every token to all of them.
"""

from math import exp, log
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from piper_megatron.platform.evidence import Stated

Algorithm = Literal["flat", "2dh", "halo", "rail", "rbd"]


class DispatchProfile(Stated):
    """Times on expert groups of one shape.

    Attributes:
        nodes: that a group spans.
        per_node: ranks of the group on each.
        experts: routed experts of the layer.
        topk: experts of a token.
        token_bytes: hidden states of a rank's tokens, before any copy is made, ascending.
        seconds: of one dispatch and one combine at each of `token_bytes`, the median of the slowest
            rank, by algorithm.
    """

    nodes: PositiveInt
    per_node: PositiveInt
    experts: PositiveInt
    topk: PositiveInt
    token_bytes: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]
    seconds: Annotated[dict[Algorithm, tuple[PositiveFloat, ...]], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> "DispatchProfile":
        if list(self.token_bytes) != sorted(set(self.token_bytes)):
            raise ValueError("token_bytes must ascend")
        for algorithm, seconds in self.seconds.items():
            if len(seconds) != len(self.token_bytes):
                raise ValueError(
                    f"seconds.{algorithm} has {len(seconds)} numbers for {len(self.token_bytes)} "
                    "of token_bytes"
                )
        return self

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Nodes, ranks a node, experts, top-k: what must be as measured."""
        return self.nodes, self.per_node, self.experts, self.topk

    def at(self, token_bytes: float) -> dict[str, float] | None:
        """Seconds by algorithm, linear between logarithms; None outside the measured sizes."""
        sizes = self.token_bytes
        if not sizes[0] <= token_bytes <= sizes[-1]:
            return None
        above = next(place for place, size in enumerate(sizes) if size >= token_bytes)
        below = max(above - 1, 0)
        span = log(sizes[above] / sizes[below])
        share = log(token_bytes / sizes[below]) / span if span else 0.0
        return {
            algorithm: exp(log(times[below]) * (1 - share) + log(times[above]) * share)
            for algorithm, times in self.seconds.items()
        }
