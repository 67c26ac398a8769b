"""What it costs to send tokens to their experts and back, by dispatcher.

Megatron's `alltoall` sends a row for every expert, and `--piper-dispatcher` has the ways of
`dispatch_rows.py` and `piper_dispatch.py`. `flex` sends a row once to every fast domain, then once
to every rank, and has its kernels do both at once.
"""

from dataclasses import dataclass

import numpy as np

from piper_megatron.layout.sizes import Number
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.dispatch_rows import distinct_domains
from piper_megatron.resources.network import Cost, all_to_all_cost
from piper_megatron.resources.piper_dispatch import Exchanges, split
from piper_megatron.resources.reach import Reach
from piper_megatron.workload.dispatcher_flags import ALGORITHMS, AUTO
from piper_megatron.workload.spec import Experts, TrainingSpec

# ranks agree on row counts by a kernel of their own when rows leave the NVLink domain; 37 to 66 us
# on 2 and 4 nodes of H100, ai-dynamo/aiconfigurator (095f58a5, 2026-08-21)
_NOTIFY_S = 55e-6
# of a probability: these kernels take fp32 alone
_FUSED_PROBABILITY_BYTES = 4
# a level belongs to the domain of fused kernels while it is at least this fast against the node
_STILL_FAST = 0.5


def dispatch_cost(
    platform: Platform,
    training: TrainingSpec,
    experts: Experts,
    reach: Reach,
    *,
    tokens: Number,
    row_bytes: int,
    copies: Number = 1,
    probabilities: bool = True,
) -> Cost:
    """Cost of one exchange of a MoE layer: dispatch or combine, forward or backward.

    All four move as many rows; combines go the other way, with partial sums where rows are
    de-duplicated.

    Args:
        platform: levels and curves.
        training: gives the dispatcher; `allgather` is none of these.
        experts: routed experts.
        reach: of the group that exchanges.
        tokens: of a rank, those of the busiest one where load is uneven.
        row_bytes: of a token.
        copies: ranks that each row goes to for an expert (ETP, in the tp-ep group of `flex`).
        probabilities: travel with the rows.
    """
    if training.dispatcher == "flex":
        return _fused(
            platform,
            training.flex_backend,
            experts,
            reach,
            tokens * (row_bytes + probabilities * _FUSED_PROBABILITY_BYTES),
            copies,
            first=probabilities,
        )
    ways = Ways.of(platform, training, experts, reach, tokens=tokens, row_bytes=row_bytes)
    return ways.exchange(probabilities=probabilities)


def announcement_cost(
    platform: Platform,
    training: TrainingSpec,
    experts: Experts,
    reach: Reach,
    gathered: Reach,
    *,
    tokens: Number,
    row_bytes: int,
) -> Cost:
    """Cost of telling all ranks how many rows come, before those of a forward pass.

    token_dispatcher.py:MoEAlltoAllTokenDispatcher.preprocess (0.19.2), and
    `Exchanges.announcement`.

    Args:
        platform: as for `dispatch_cost`.
        training: as for `dispatch_cost`.
        experts: as for `dispatch_cost`.
        reach: as for `dispatch_cost`.
        gathered: of the tp-ep group.
        tokens: as for `dispatch_cost`.
        row_bytes: as for `dispatch_cost`.
    """
    ways = Ways.of(platform, training, experts, reach, tokens=tokens, row_bytes=row_bytes)
    return ways.announcement(gathered)


@dataclass(frozen=True)
class Ways:
    """The algorithms that a dispatcher may take, and which of them it takes in each layout.

    Attributes:
        options: the exchanges of each algorithm.
        best: place of the quickest one, or an array [layouts].
    """

    options: tuple[Exchanges, ...]
    best: Number

    @classmethod
    def of(
        cls,
        platform: Platform,
        training: TrainingSpec,
        experts: Experts,
        reach: Reach,
        *,
        tokens: Number,
        row_bytes: int,
    ) -> "Ways":
        """Those of any dispatcher but `flex`; arguments as for `dispatch_cost`."""
        algorithms = {"alltoall": ("flat",), AUTO: ALGORITHMS}.get(
            training.dispatcher, (training.dispatcher,)
        )
        options = tuple(
            Exchanges(
                algorithm=algorithm,
                platform=platform,
                training=training,
                experts=experts,
                reach=reach,
                tokens=tokens,
                row_bytes=row_bytes,
                chunks=training.dispatcher_chunks,
            )
            for algorithm in algorithms
        )
        if len(options) == 1:
            return cls(options, 0)
        seconds = np.stack([np.asarray(each.round_trip().seconds) for each in options])
        # inside one node there is one hop
        return cls(options, np.where(options[0].nodes > 1, seconds.argmin(axis=0), 0))

    def exchange(self, *, probabilities: bool) -> Cost:
        """Of a dispatch or a combine, one way."""
        return _selected(
            [
                each.rows() + each.probabilities() if probabilities else each.rows()
                for each in self.options
            ],
            self.best,
        )

    def announcement(self, gathered: Reach) -> Cost:
        """Of the numbers of rows, as for `announcement_cost`."""
        return _selected([each.announcement(gathered) for each in self.options], self.best)


def _selected(costs: list[Cost], best: Number) -> Cost:
    if len(costs) == 1:
        return costs[0]

    def of_best(values: list[Number]) -> Number:
        chosen = values[0]
        for place, value in enumerate(values[1:], 1):
            chosen = np.where(np.equal(best, place), value, chosen)
        return chosen

    levels = zip(*(cost.bytes_by_level for cost in costs), strict=True)
    return Cost(
        of_best([cost.seconds for cost in costs]),
        tuple(of_best(list(sent)) for sent in levels),
        of_best([cost.messages for cost in costs]),
    )


def _fused(
    platform: Platform,
    backend: str,
    experts: Experts,
    reach: Reach,
    held_bytes: Number,
    copies: Number,
    *,
    first: bool,
) -> Cost:
    """Kernels that send a row once to every NVLink domain and forward it there, both at once.

    megatron/core/transformer/moe/fused_a2a.py (0.19.2): rows travel in the activations' format.
    HybridEP and NCCL-EP take the domain of the whole NVLink fabric, DeepEP that of a node.
    """
    kernel = "deepep" if backend == "deepep" else "hybridep"
    domain = platform.node_level if backend == "deepep" else fast_level(platform)
    inside, rail = split(reach, domain)
    once_a_domain = distinct_domains(experts, rail.members)
    once_a_rank = copies * distinct_domains(experts, reach.members / copies)
    far = once_a_domain * (rail.members - 1) / rail.members
    near = once_a_rank * (inside.members - 1) / inside.members
    cost = all_to_all_cost(platform, rail, far * held_bytes, kernel=kernel).beside(
        all_to_all_cost(platform, inside, near * held_bytes, kernel=kernel)
    )
    notify = np.where(np.greater(rail.members, 1), _NOTIFY_S, 0.0) if first else 0.0
    return Cost(cost.seconds + notify, cost.bytes_by_level, cost.messages)


def fast_level(platform: Platform) -> int:
    """The outermost level of the domain that links inside a node span: a rack of NVL72."""
    levels, node = platform.levels, platform.node_level
    last = node
    while last + 1 < len(levels) and levels[last + 1].gbps >= _STILL_FAST * levels[node].gbps:
        last += 1
    return last
