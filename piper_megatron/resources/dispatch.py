"""What it costs to send tokens to their experts and back, by dispatcher.

Rows are counted in expectation under uniform routing without replacement: `distinct_domains` of the
M nodes and g ranks a node of an expert group. Per token that visits k experts, with D(n) of n equal
parts of the experts:

| dispatcher | rows between nodes | rows inside a node            | messages          |
|------------|--------------------|-------------------------------|-------------------|
| flat       | k (M-1)/M          | k (g-1)/(Mg)                  | (M-1)g, g-1       |
| 2dh        | k (M-1)/M          | k (g-1)/g                     | M-1, g-1          |
| halo       | k (M-1)/M          | k (g-1)/(Mg), k (g-1)(M-1)/(Mg) | M-1, 2 (g-1)    |
| rail       | D(M) (M-1)/M       | D(Mg) (g-1)/g                 | M-1, g-1          |
| rbd        | D(M) (M-1)/M       | D(M)/M (g-1)/g + replicas     | (M-1)g, 2 (g-1)   |

`flat` is Megatron's alltoall; `2dh` is arXiv:2206.03382, `halo` arXiv:2605.05049, `rbd`
arXiv:2508.13337; `rail` sends each row once to every node, then once to every rank, as DeepEP
does. `flex` has its kernels do that at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import comb, prod

import numpy as np

from piper_megatron.layout.collectives import Collective, Operation, probability_bytes
from piper_megatron.layout.sizes import Number
from piper_megatron.platform.platform import Platform
from piper_megatron.resources.network import (
    Cost,
    all_to_all_cost,
    collective_cost,
    no_cost,
)
from piper_megatron.resources.reach import Reach
from piper_megatron.workload.spec import Experts, TrainingSpec

# ranks agree on row counts by a kernel of their own when rows leave the NVLink domain; 37 to 66 us
# on 2 and 4 nodes of H100, ai-dynamo/aiconfigurator (095f58a5, 2026-08-21)
_NOTIFY_S = 55e-6
# of a probability: these kernels take fp32 alone
_FUSED_PROBABILITY_BYTES = 4
# a level belongs to the domain of fused kernels while it is at least this fast against the node
_STILL_FAST = 0.5
_PIPER = ("flat", "2dh", "halo", "rail", "rbd")


@dataclass(frozen=True)
class Rows:
    """Rows that a rank sends for each of its tokens, in expectation.

    Attributes:
        between: to other nodes.
        inside: to other ranks of its node, one number for each phase.
        copied: rows that extra passes over buffers read and write.
    """

    between: Number
    inside: tuple[Number, ...]
    copied: Number = 0.0


def distinct_domains(experts: Experts, domains: Number) -> Number:
    """D(n): of n domains with E / n experts each, those that hold an expert of a token.

    With group-limited routing, groups are chosen uniformly, then experts inside them.

    Args:
        experts: count, top-k and groups.
        domains: n, one number or many.
    """
    count, topk = experts.count, experts.topk
    share = count / np.maximum(domains, 1)
    if not experts.groups or not experts.topk_groups:
        return domains * (1 - _missed(count, share, topk))
    groups, kept = experts.groups, experts.topk_groups
    per_group = count // groups
    eligible = kept * per_group
    in_part_of_a_group = (kept / groups) * (1 - _missed(eligible, share, topk))
    whole = groups / np.maximum(domains, 1)
    in_whole_groups = sum(
        _choose(whole, chosen)
        * _choose(groups - whole, kept - chosen)
        / comb(groups, kept)
        * (1 - _missed(eligible, chosen * per_group, topk))
        for chosen in range(1, kept + 1)
    )
    return domains * np.where(np.less_equal(domains, groups), in_whole_groups, in_part_of_a_group)


def _missed(count: int, share: Number, topk: int) -> Number:
    """Chance that none of `topk` distinct experts out of `count` is among `share` of them."""
    return prod(np.maximum(count - share - i, 0) / max(count - i, 1) for i in range(topk))


def _choose(count: Number, chosen: int) -> Number:
    """Binomial coefficient of a number that need not be whole."""
    return prod(np.maximum(count - i, 0) / (i + 1) for i in range(chosen))


def rows_per_token(dispatcher: str, experts: Experts, nodes: Number, per_node: Number) -> Rows:
    """Rows of the table above.

    Args:
        dispatcher: a row of it.
        experts: routed experts.
        nodes: M.
        per_node: g.
    """
    k, away, others = experts.topk, (nodes - 1) / nodes, (per_node - 1) / per_node
    once_a_node = distinct_domains(experts, nodes)
    match dispatcher:
        case "flat":
            return Rows(k * away, (k * others / nodes,))
        case "2dh":
            return Rows(k * away, (k * others,), copied=2 * k)
        case "halo":
            # packed, and transposed before and after its last phase
            return Rows(k * away, (k * others / nodes, k * others * away), copied=3 * k * away)
        case "rail":
            once_a_rank = distinct_domains(experts, nodes * per_node)
            return Rows(once_a_node * away, (once_a_rank * others,), once_a_node + once_a_rank)
        case "rbd":
            local = experts.count / (nodes * per_node)
            of_node = np.maximum(experts.count / nodes - 1, 1)
            elsewhere = 1 - (local - 1) / of_node
            replicas = (k - once_a_node) * elsewhere
            pilots = once_a_node / nodes * others
            return Rows(once_a_node * away, (pilots, replicas), copied=once_a_node + k)
    raise AssertionError(f"no dispatcher {dispatcher}")


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
    if training.dispatcher == "alltoall":
        rows = _flat(platform, experts, reach, tokens * row_bytes)
        if not probabilities:
            return rows
        # a call of their own: token_dispatcher.py:MoEAlltoAllTokenDispatcher.token_dispatch
        return rows + _flat(platform, experts, reach, tokens * probability_bytes(training))
    held_bytes = tokens * (row_bytes + probabilities * probability_bytes(training))
    if training.dispatcher == "auto":
        options = [_ALGORITHMS[name](platform, experts, reach, held_bytes) for name in _PIPER]
        return _cheapest(options)
    return _ALGORITHMS[training.dispatcher](platform, experts, reach, held_bytes)


def counts_cost(platform: Platform, experts: Experts, reach: Reach) -> Cost:
    """Cost of telling all ranks how many rows every expert gets.

    token_dispatcher.py:MoEAlltoAllTokenDispatcher.preprocess (0.19.2): int64, one for each expert.
    """
    counts = Collective(
        "dispatch", "tp_ep", Operation.ALL_GATHER, 8 * experts.count * reach.members, "forward"
    )
    return collective_cost(platform, reach, counts)


def _cheapest(options: list[Cost]) -> Cost:
    best = options[0]
    for option in options[1:]:
        better = np.less(option.seconds, best.seconds)
        best = Cost(
            np.where(better, option.seconds, best.seconds),
            tuple(
                np.where(better, new, old)
                for new, old in zip(option.bytes_by_level, best.bytes_by_level, strict=True)
            ),
            np.where(better, option.messages, best.messages),
        )
    return best


def _split(reach: Reach, level: int) -> tuple[Reach, Reach]:
    """A group's members in one domain of a level, and those with one place in all domains."""
    domains = reach.domains[level]
    inside = tuple(
        n / domains if i <= level else np.ones_like(domains) for i, n in enumerate(reach.domains)
    )
    rail = tuple(domains if i <= level else n for i, n in enumerate(reach.domains))
    return Reach(reach.members / domains, inside), Reach(domains, rail)


def _rows(dispatcher: str, platform: Platform, experts: Experts, reach: Reach) -> Rows:
    inside, rail = _split(reach, platform.node_level)
    return rows_per_token(dispatcher, experts, rail.members, inside.members)


def _flat(platform: Platform, experts: Experts, reach: Reach, held_bytes: Number) -> Cost:
    sent = held_bytes * experts.topk
    away = (reach.members - 1) / reach.members
    return all_to_all_cost(platform, reach, sent * away, sent / reach.members)


def _two_hops(platform: Platform, experts: Experts, reach: Reach, held_bytes: Number) -> Cost:
    rows = _rows("2dh", platform, experts, reach)
    inside, rail = _split(reach, platform.node_level)
    return (
        all_to_all_cost(platform, inside, rows.inside[0] * held_bytes)
        + all_to_all_cost(platform, rail, rows.between * held_bytes, kernel="point_to_point")
        + _copies(platform, reach, rows.copied * held_bytes)
    )


def _halo(platform: Platform, experts: Experts, reach: Reach, held_bytes: Number) -> Cost:
    """In-node traffic beside the rails, then what came in is spread over the node."""
    rows = _rows("halo", platform, experts, reach)
    inside, rail = _split(reach, platform.node_level)
    near, spread = (all_to_all_cost(platform, inside, n * held_bytes) for n in rows.inside)
    far = all_to_all_cost(platform, rail, rows.between * held_bytes, kernel="point_to_point")
    return near.beside(far) + spread + _copies(platform, reach, rows.copied * held_bytes)


def _rail(platform: Platform, experts: Experts, reach: Reach, held_bytes: Number) -> Cost:
    rows = _rows("rail", platform, experts, reach)
    inside, rail = _split(reach, platform.node_level)
    return (
        all_to_all_cost(platform, rail, rows.between * held_bytes, kernel="point_to_point")
        + all_to_all_cost(platform, inside, rows.inside[0] * held_bytes)
        + _copies(platform, reach, rows.copied * held_bytes)
    )


def _pilots_and_replicas(
    platform: Platform, experts: Experts, reach: Reach, held_bytes: Number
) -> Cost:
    rows = _rows("rbd", platform, experts, reach)
    inside, _ = _split(reach, platform.node_level)
    pilots = rows.between + rows.inside[0]
    replicas = all_to_all_cost(platform, inside, rows.inside[1] * held_bytes)
    return (
        all_to_all_cost(platform, reach, pilots * held_bytes)
        + replicas
        + _copies(platform, reach, rows.copied * held_bytes)
    )


def _copies(platform: Platform, reach: Reach, copied_bytes: Number) -> Cost:
    """Passes over buffers that the exchange itself does not need; each byte is read and written."""
    accelerator = platform.need_accelerator()
    rate = accelerator.hbm.gbps * 1e9 * accelerator.kernels.permute_efficiency
    seconds = np.where(np.greater(reach.members, 1), 2 * copied_bytes / rate, 0.0)
    return Cost(seconds, no_cost(platform).bytes_by_level, 0)


_Algorithm = Callable[[Platform, Experts, Reach, Number], Cost]
_ALGORITHMS: dict[str, _Algorithm] = {
    "flat": _flat,
    "2dh": _two_hops,
    "halo": _halo,
    "rail": _rail,
    "rbd": _pilots_and_replicas,
}


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
    inside, rail = _split(reach, domain)
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
