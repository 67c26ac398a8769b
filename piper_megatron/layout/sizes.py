"""Sizes of one layout, or of many at once."""

from dataclasses import dataclass

import numpy as np

# one layout's value, or an array [layouts] with one for each; formulas work on both
Number = int | float | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Parallel sizes and batch, by which the formulas of the resource model vary.

    The formulas never branch on them, so that one evaluation prices thousands of layouts.

    Attributes:
        world, tp, cp, pp, ep, etp: as in `ParallelLayout`.
        vpp: chunks of a pipeline rank.
        micro_batch: sequences of a micro-batch on one data-parallel replica.
        global_batch: sequences of a step.
        seq: tokens of a sequence.
    """

    world: Number
    tp: Number
    cp: Number
    pp: Number
    ep: Number
    etp: Number
    vpp: Number
    micro_batch: Number
    global_batch: int
    seq: int

    @property
    def layouts(self) -> int:
        """How many layouts these are."""
        return int(np.size(self.tp))

    @property
    def dp(self) -> Number:
        """Data-parallel size of the dense parameters, without context parallelism."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> Number:
        """Data-parallel size of the expert parameters."""
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def micro_batches(self) -> Number:
        """Micro-batches of a step on each data-parallel replica."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def tokens(self) -> Number:
        """Tokens of a micro-batch on a context-parallel rank, before sequence parallelism."""
        return self.micro_batch * self.seq / self.cp
