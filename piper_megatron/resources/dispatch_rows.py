"""How many rows a dispatcher sends for each token, in expectation.

Under uniform routing without replacement, with D(n) of n equal parts of the experts that hold one
of a token's k experts, for an expert group of M nodes with g ranks each:

|      | between nodes | beside it, own node | inside, in a hop of its own | messages       |
|------|---------------|---------------------|-----------------------------|----------------|
| flat | k (M-1)/M     | k (g-1)/(Mg)        |                             | Mg - 1         |
| 2dh  | k (M-1)/M     |                     | k (g-1)/g                   | M-1 and g-1    |
| halo | k (M-1)/M     |                     | k (g-1)/g                   | M-1 and g-1 *  |
| rail | D(M) (M-1)/M  |                     | D(Mg) (g-1)/g               | M-1 and g-1 *  |
| rbd  | D(M) (M-1)/M  | D(M) (g-1)/(Mg)     | D(Mg) - D(M)                | Mg-1 and g-1 * |

(* in each round.)
`flat` is Megatron's alltoall; `2dh` is arXiv:2206.03382, `halo` arXiv:2605.05049, `rbd`
arXiv:2508.13337; `rail` sends a row once to every node, then once to every rank, as DeepEP does.
The paper of `rbd` sends a replica to every expert, (k - D(M)) (1 - (e - 1) / (E/M - 1)) rows with e
of E experts on a rank; one for each rank is less.
"""

from dataclasses import dataclass
from math import comb, prod

import numpy as np

from piper_megatron.layout.sizes import Number
from piper_megatron.workload.spec import Experts

# layouts, beyond which equal ones among them are computed once
_FEW = 64


@dataclass(frozen=True)
class Distinct:
    """Places that a token reaches, on average: expected, or counted in a routing trace.

    Attributes:
        nodes: nodes with one of its experts.
        ranks: ranks with one of its experts.
    """

    nodes: Number
    ranks: Number


@dataclass(frozen=True)
class Rows:
    """Rows that a rank sends for each of its tokens.

    Attributes:
        between: to other nodes.
        beside: in the same hop, to ranks of its own node.
        near: inside the node in a hop of their own, of the node's own tokens.
        spread: the same, of tokens that came from other nodes, or are about to go there.
        copied: rows that extra passes over buffers read and write.
    """

    between: Number
    beside: Number = 0.0
    near: Number = 0.0
    spread: Number = 0.0
    copied: Number = 0.0

    @property
    def inside(self) -> Number:
        """To other ranks of a node, in all hops."""
        return self.beside + self.near + self.spread


def distinct_domains(experts: Experts, domains: Number) -> Number:
    """D(n): of n domains with E / n experts each, those that hold an expert of a token.

    With group-limited routing, groups are chosen uniformly, then experts inside them.

    Args:
        experts: count, top-k and groups.
        domains: n, one number or many.
    """
    if np.size(domains) > _FEW:
        some, which = np.unique(domains, return_inverse=True)
        return np.asarray(distinct_domains(experts, some))[which]
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


def expected(experts: Experts, nodes: Number, per_node: Number) -> Distinct:
    """Places that a token reaches under uniform routing, with M nodes of g ranks."""
    return Distinct(distinct_domains(experts, nodes), distinct_domains(experts, nodes * per_node))


def rows_per_token(
    dispatcher: str, topk: int, reached: Distinct, nodes: Number, per_node: Number
) -> Rows:
    """Rows of the table above.

    Args:
        dispatcher: a row of it.
        topk: k.
        reached: D(M) and D(Mg).
        nodes: M.
        per_node: g.
    """
    k, away, others = topk, (nodes - 1) / nodes, (per_node - 1) / per_node
    match dispatcher:
        case "flat":
            return Rows(k * away, beside=k * others / nodes)
        case "2dh":
            # put in order before each hop
            return Rows(k * away, spread=k * others, copied=2 * k)
        case "halo":
            return Rows(k * away, near=k * others / nodes, spread=k * others * away)
        case "rail":
            second = reached.ranks * others
            return Rows(
                reached.nodes * away,
                near=second / nodes,
                spread=second * away,
                copied=reached.nodes + reached.ranks,
            )
        case "rbd":
            replicas = reached.ranks - reached.nodes
            return Rows(
                reached.nodes * away,
                beside=reached.nodes * others / nodes,
                near=replicas / nodes,
                spread=replicas * away,
                copied=reached.nodes + reached.ranks,
            )
    raise AssertionError(f"no dispatcher {dispatcher}")


def pairs_per_token(
    dispatcher: str, topk: int, reached: Distinct, nodes: Number, per_node: Number
) -> Rows:
    """(Token, expert) pairs that go the way of the rows; each carries a probability."""
    if dispatcher in ("flat", "2dh", "halo"):
        return rows_per_token(dispatcher, topk, reached, nodes, per_node)
    away, others = (nodes - 1) / nodes, (per_node - 1) / per_node
    if dispatcher == "rail":
        return Rows(topk * away, near=topk * others / nodes, spread=topk * others * away)
    # a relay needs the row for experts of its own
    passed_on = topk * (1 - reached.nodes / reached.ranks)
    return Rows(
        topk * away,
        beside=topk * others / nodes,
        near=passed_on / nodes,
        spread=passed_on * away,
    )
